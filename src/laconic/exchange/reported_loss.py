"""Held-out losses that a training reports, and how much of a budget of errors they leave: pure, without a network.

Callers: `noise.py` and `consistency/period.py`, each with one of its own. Ranks report when they like, each its own; at
a review they average what was reported since the last, so that all come to the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from laconic.storage.form import check_like

RISEN = 0.02  # of the lowest loss so far; a smaller rise is taken for chance
MOST_HALVINGS = 3


class ReportedLoss:
    """The losses since the last review, the lowest of all reviews, and how often it halves a budget.

    A review whose mean loss is RISEN above the lowest so far, or is not finite, halves the budget once more, up to
    MOST_HALVINGS times. One whose loss is not takes a halving back.

    >>> reported, halvings = ReportedLoss(), []
    >>> for loss in (2.0, 1.0, 1.1, 1.2, 1.0):
    ...     reported.report(loss)
    ...     reported.follow(*reported.take())
    ...     halvings.append(reported.halvings)
    >>> halvings
    [0, 0, 1, 2, 1]
    """

    def __init__(self) -> None:
        self.lowest = math.nan
        self.halvings = 0
        self._total, self._count = 0.0, 0

    def report(self, loss: float) -> None:
        """Note one loss of this rank's."""
        self._total, self._count = self._total + loss, self._count + 1

    def take(self) -> tuple[float, float]:
        """The sum and number of the losses of this rank that no review has seen."""
        taken = self._total, float(self._count)
        self._total, self._count = 0.0, 0
        return taken

    def follow(self, total: float, count: float) -> None:
        """Review what all ranks took together; a mean of sums and numbers serves as well."""
        if not count:
            return
        loss = total / count
        risen = loss > self.lowest + RISEN * abs(self.lowest) or not math.isfinite(loss)
        self.halvings = min(MOST_HALVINGS, self.halvings + 1) if risen else max(0, self.halvings - 1)
        if math.isfinite(loss) and not loss >= self.lowest:  # also the first
            self.lowest = loss

    def why(self) -> str:
        """What of the budget is left, as the end of a verdict; nothing while all of it is."""
        return f"; the reported loss has risen, so 1/{2**self.halvings} of it" if self.halvings else ""

    def state_dict(self) -> dict[str, Any]:
        kept = {"lowest": self.lowest, "halvings": self.halvings}
        return {**kept, "total": self._total, "count": self._count}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_like(state, {"lowest": 0.0, "halvings": 0, "total": 0.0, "count": 0}, "the state of the reported loss")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.lowest, self.halvings = float(state["lowest"]), int(state["halvings"])
        self._total, self._count = float(state["total"]), int(state["count"])
