"""Scalars for TensorBoard, from the lines of metrics.jsonl; needs the extra `tensorboard`.

Caller: `laconic report --tensorboard`. Each trial is a run of its own, so that TensorBoard draws them side by side:
`<folder>/<trial>/…`, one scalar per number of a line, at that line's step.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from laconic.errors import MissingExtra
from laconic.lab.records import metrics


def export(run: str | os.PathLike[str], folder: str | os.PathLike[str]) -> int:
    """Write the metrics of a run for TensorBoard; returns how many scalars there were.

    Raises:
        MissingExtra: tensorboard is not installed.
    """
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise MissingExtra("tensorboard", "tensorboard") from error
    writers: dict[str, Any] = {}
    scalars = 0
    with contextlib.ExitStack() as stack:
        for line in metrics.read(run):
            step, trial = line.pop("step", None), str(line.pop("trial", "run"))
            if not isinstance(step, int):
                continue
            if trial not in writers:
                safe = "".join(c if c.isalnum() or c in "+-_.()," else "_" for c in trial)
                writers[trial] = stack.enter_context(SummaryWriter(str(Path(folder) / safe)))
            for name, value in line.items():
                if isinstance(value, int | float) and not isinstance(value, bool):
                    writers[trial].add_scalar(name, value, step)
                    scalars += 1
    return scalars
