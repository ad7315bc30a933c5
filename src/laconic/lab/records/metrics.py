"""The running log of a run: metrics.jsonl, one JSON object a line, appended and flushed as training goes on.

Callers: the trainer writes it, `report` and TensorBoard read it. Each line names its "trial" and its "step"; the rest
is what was measured there. A process that is killed while it writes leaves half a line at the end: reading skips it,
and the next append begins on a fresh line.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Any

from laconic.errors import PayloadError, RecordError
from laconic.lab.records.fields import encode
from laconic.storage.json_text import read_lines

FILE = "metrics.jsonl"


class Metrics:
    """Appends lines to `folder`/metrics.jsonl.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with Metrics(folder) as metrics:
    ...         metrics.add(trial=0, step=10, train_loss=0.5)
    ...     list(read(folder))
    [{'trial': 0, 'step': 10, 'train_loss': 0.5}]
    """

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        path = Path(folder) / FILE
        path.parent.mkdir(parents=True, exist_ok=True)
        torn = path.exists() and path.read_bytes()[-1:] not in (b"", b"\n")
        self._file = open(path, "a", encoding="utf-8")  # noqa: SIM115 (closed by close)
        if torn:
            self._file.write("\n")

    def add(self, **values: Any) -> None:
        """Append one line and hand it to the operating system."""
        self._file.write(json.dumps(encode(values), ensure_ascii=False, allow_nan=False) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file; adding after it is an error."""
        self._file.close()

    def __enter__(self) -> Metrics:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


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
