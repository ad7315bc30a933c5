"""Monitor a worker while it trains: a line of metrics a few times a second, and the bytes its interface sent.

Callers: the trainer on rank 0, and the coordinator of an elastic training.
"""

from __future__ import annotations

import time
from collections import deque
from pathlib import Path

from laconic_lab.clusters.cluster import interface_nbytes
from laconic_lab.records import metrics
from laconic_lab.runs.trial import StepFigures

EVERY_S = 0.2  # how often a line of metrics is written
RECENT = 20  # steps that rates are over


class Monitor:
    """Writes the metrics of one trial, the `trial`-th of the run in `folder`; None writes nothing."""

    def __init__(self, folder: Path | None, trial: int, samples_per_step: float) -> None:
        self._folder, self._trial, self._samples = folder, trial, samples_per_step
        self._recent: deque[StepFigures] = deque(maxlen=RECENT)
        self._shown_s = 0.0

    def note(self, figures: StepFigures) -> None:
        """Count a step in the rates."""
        self._recent.append(figures)

    def is_due(self) -> bool:
        """Whether it is time for another line."""
        return self._folder is not None and time.monotonic() > self._shown_s + EVERY_S

    def show(self, step: int, **values: float | None) -> None:
        """Write a line."""
        if self._folder is None or not self._recent:
            return
        self._shown_s = time.monotonic()
        recent_s = max(1e-9, sum(each.seconds for each in self._recent))
        metrics.add(
            self._folder, trial=self._trial, step=step, train_loss=self._recent[-1].loss,
            samples_per_s=self._samples * len(self._recent) / recent_s,
            sent_Bps=sum(each.sent for each in self._recent) / recent_s, **values,
        )  # fmt: skip


class SentCounter:
    """What this rank's network interface has sent, as the kernel counts it; unused where the exchange counts."""

    def __init__(self, counted_by: str) -> None:
        self.is_used = counted_by == "interface"
        self._before = 0
        self.restart()

    def restart(self) -> None:
        """Count from here."""
        self._before = interface_nbytes() if self.is_used else 0

    def taken(self) -> float:
        """The bytes since the last call, or the restart."""
        before = self._before
        self.restart()
        return float(self._before - before)
