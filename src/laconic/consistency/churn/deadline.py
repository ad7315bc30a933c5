"""How long to wait for others before they count as lost: learned from how long steps have taken here.

Callers: `group.py`. A constant would be too short for one model and far too long for another.
"""

from __future__ import annotations

from collections import deque

from laconic.errors import BadInput


class Deadline:
    """A multiple of a high quantile of past steps' seconds, `factor` · q(`quantile`), and never below `floor_s`.

    >>> deadline = Deadline(patience_s=10.0)
    >>> deadline.seconds
    10.0
    >>> for _ in range(100):
    ...     deadline.observe(0.5)
    >>> deadline.seconds
    2.0

    Args:
        patience_s: before `enough` steps have been seen.
        floor_s: what a living process may need to be scheduled on a crowded machine.
        factor: how much longer than almost all steps a step may take.
        quantile: of the last `kept` steps.
    """

    def __init__(
        self,
        patience_s: float = 5.0,
        *,
        floor_s: float = 0.5,
        factor: float = 4.0,
        quantile: float = 0.99,
        kept: int = 256,
        enough: int = 16,
    ) -> None:
        if patience_s <= 0 or floor_s <= 0 or factor < 1 or not 0 < quantile <= 1:
            raise BadInput("a deadline needs positive seconds, factor ≥ 1 and 0 < quantile ≤ 1")
        self.patience_s, self._floor_s, self._factor, self._quantile = patience_s, floor_s, factor, quantile
        self._enough = enough
        self._steps: deque[float] = deque(maxlen=kept)
        self._seconds = patience_s

    @property
    def learned(self) -> bool:
        """Whether enough steps have been seen."""
        return len(self._steps) >= self._enough

    @property
    def seconds(self) -> float:
        """How long to wait now."""
        return self._seconds

    def observe(self, seconds: float) -> None:
        """A step that nobody was missing from took so long."""
        self._steps.append(seconds)
        if self.learned:
            ordered = sorted(self._steps)
            place = min(len(ordered) - 1, int(self._quantile * len(ordered)))
            self._seconds = max(self._floor_s, self._factor * ordered[place])
