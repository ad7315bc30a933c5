"""The running log of a run: metrics.jsonl, one JSON object a line, appended as training goes on.

Callers: the trainer writes it, `report` and TensorBoard read it. Each line names its "trial" and its "step"; the rest
is what was measured there. A process that is killed while it writes leaves half a line at the end: reading skips it.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laconic.errors import PayloadError, RecordError
from laconic.storage.files import append
from laconic.storage.json_text import read_lines
from laconic.storage.typed_json import to_plain

FILE = "metrics.jsonl"


def add(folder: str | os.PathLike[str], **values: Any) -> None:
    """Append one line to `folder`/metrics.jsonl.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     add(folder, trial=0, step=10, train_loss=0.5)
    ...     list(read(folder))
    [{'trial': 0, 'step': 10, 'train_loss': 0.5}]
    """
    append(Path(folder) / FILE, [json.dumps(to_plain(values), ensure_ascii=False, allow_nan=False)])


def read(folder: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The lines of a run's metrics, in order; none where there is no file. Torn lines are left out.

    Raises:
        RecordError: the file is there and cannot be read.
    """
    try:
        yield from read_lines(Path(folder) / FILE)
    except PayloadError as error:
        raise RecordError(str(error)) from error


def last_step(folder: str | os.PathLike[str], trial: int = 0, skip: int = 0) -> int | None:
    """The newest step of a trial that a line tells of, after the first `skip` lines; None where there is none."""
    lines = list(read(folder))[skip:]
    steps = [line["step"] for line in lines if line.get("trial") == trial and isinstance(line.get("step"), int)]
    return steps[-1] if steps else None
