"""Rows that several processes append to one file, and that outlive whoever is killed while writing.

Callers: elastic training. A row is one line of JSON: of a writer that dies in the middle only its own row is lost.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import asdict
from pathlib import Path
from typing import Generic, TypeVar

from laconic.storage.files import append
from laconic.storage.json_text import parse_lines

Row = TypeVar("Row")
_TAIL_NBYTES = 4096


class Journal(Generic[Row]):
    """The rows of one kind in one file; it is made by the first row.

    Args:
        path: the file.
        kind: the rows' dataclass, of plain values.
    """

    def __init__(self, path: Path, kind: type[Row]) -> None:
        self.path, self._kind = path, kind

    def add(self, row: Row) -> None:
        """Append a row; whoever reads afterwards sees it, also when this process is killed."""
        append(self.path, [json.dumps(asdict(row), ensure_ascii=False)])  # type: ignore[call-overload]

    def read(self) -> list[Row]:
        """All whole rows, in the order they were written."""
        try:
            return self._rows(self.path.read_bytes())
        except FileNotFoundError:
            return []

    def last(self) -> Row | None:
        """The newest whole row."""
        try:
            with open(self.path, "rb") as file:
                file.seek(max(0, self.nbytes - _TAIL_NBYTES))
                rows = self._rows(file.read())
        except FileNotFoundError:
            return None
        return rows[-1] if rows else None

    @property
    def nbytes(self) -> int:
        """The file's size: it grows with every row."""
        return self.path.stat().st_size if self.path.exists() else 0

    def _rows(self, text: bytes) -> list[Row]:
        rows = []
        for values in parse_lines(text):
            with contextlib.suppress(TypeError):  # another kind of row
                rows.append(self._kind(**values))
        return rows
