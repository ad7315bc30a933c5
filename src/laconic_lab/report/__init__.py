"""The report of a run: `report.html`, one file that opens offline, and its figures as CSV, PNG or SVG.

Callers: `laconic report`, `compare` and `train` at their end.
"""

from __future__ import annotations

import os
from importlib.util import find_spec
from pathlib import Path

from laconic.errors import MissingExtra
from laconic.storage.files import replace
from laconic_lab.lint import lint
from laconic_lab.records.record import Record

FILE = "report.html"
__all__ = ["FILE", "write_report"]

for needed in ("matplotlib", "jinja2"):  # before a training, whose report would be wanted at its end
    if find_spec(needed) is None:
        raise MissingExtra(needed, "lab")


def write_report(record: Record, folder: str | os.PathLike[str], name: str = FILE) -> Path:
    """Lint the record as it is and write its report into `folder`; returns the file's path."""
    from laconic_lab.report.run_page import page  # matplotlib, which workers and most commands do without

    return replace(Path(folder) / name, page(record, lint(record)))
