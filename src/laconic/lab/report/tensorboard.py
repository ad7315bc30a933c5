"""Scalars for TensorBoard, from the lines of metrics.jsonl; needs the extra `tensorboard`.

Callers: `laconic report --tensorboard`, and the trainer while it trains. Each trial is a run of its own, so that
TensorBoard draws them side by side: `<folder>/<trial>/…`, one scalar per number of a line, at that line's step.
"""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType
from typing import Any

from laconic.errors import MissingExtra
from laconic.lab.records import metrics

_PLACE = ("trial", "step")


class Scalars:
    """Writes the numbers of metrics' lines for TensorBoard.

    Raises:
        MissingExtra: tensorboard is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard") from error
        self._make = SummaryWriter
        self._folder = Path(folder)
        self._writers: dict[str, Any] = {}

    def add(self, line: dict[str, Any]) -> int:
        """Write one line's numbers; returns how many there were. Lines without a step are left out."""
        step = line.get("step")
        if not isinstance(step, int):
            return 0
        numbers = {name: value for name, value in line.items() if name not in _PLACE and _is_number(value)}
        writer = self._writer(str(line.get("trial", "run")))
        for name, value in numbers.items():
            writer.add_scalar(name, value, step)
        return len(numbers)

    def _writer(self, trial: str) -> Any:
        if trial not in self._writers:
            safe = "".join(c if c.isalnum() or c in "+-_.()," else "_" for c in trial)
            self._writers[trial] = self._make(str(self._folder / safe))
        return self._writers[trial]

    def close(self) -> None:
        """Write out what is held back and close the files."""
        for writer in self._writers.values():
            writer.close()

    def __enter__(self) -> Scalars:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def export(run: str | os.PathLike[str], folder: str | os.PathLike[str]) -> int:
    """Write the metrics of a run for TensorBoard; returns how many scalars there were.

    Raises:
        MissingExtra: tensorboard is not installed.
    """
    with Scalars(folder) as scalars:
        return sum(scalars.add(line) for line in metrics.read(run))


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
