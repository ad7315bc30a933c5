"""The model in stages: a pipeline of micro-batches with compressed boundaries.

`build` makes a `Pipeline` of a model (`build.py`). What is cut is in `cutting.py`, where in `balance.py`; who computes
what when is data (`timetable.py`), and `runner.py` runs it.
"""

from __future__ import annotations

from laconic.parallel.pipeline.build import build
from laconic.parallel.pipeline.pipeline import Pipeline

__all__ = ["Pipeline", "build"]
