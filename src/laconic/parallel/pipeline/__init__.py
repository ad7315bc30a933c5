"""The model in stages: a pipeline of micro-batches with compressed boundaries.

`build` makes a `Pipeline` of a model (`build.py`). `cutting.py` cuts it, `balance.py` chooses the cuts, `timetable.py`
is the order of passes as data, and `runner.py` runs it.
"""

from __future__ import annotations

from laconic.parallel.pipeline.build import build
from laconic.parallel.pipeline.pipeline import Pipeline

__all__ = ["Pipeline", "build"]
