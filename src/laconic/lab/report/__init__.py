"""The report of a run: `report.html`, one file that opens offline, and its figures as CSV, PNG or SVG.

Callers: `laconic report`, `compare` and `train` at their end.
"""

from __future__ import annotations

import os
from pathlib import Path

from laconic.lab.lint import lint
from laconic.lab.records.record import Record
from laconic.storage.files import replace

FILE = "report.html"
__all__ = ["FILE", "write_report"]


def write_report(record: Record, folder: str | os.PathLike[str], name: str = FILE) -> Path:
    """Lint the record as it is and write its report into `folder`; returns the file's path."""
    from laconic.lab.report.run_page import page  # matplotlib, which workers and most commands do without

    return replace(Path(folder) / name, page(record, lint(record)))
