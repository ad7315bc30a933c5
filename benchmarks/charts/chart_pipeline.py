"""Draws docs/pictures/pipeline.svg: a step of our pipeline at 100 Mbit/s by stage, from benchmarks/results."""

from __future__ import annotations

import json
from pathlib import Path

from benchmarks.divide.pipeline import spans
from laconic_lab.report.bars import lanes, timed
from laconic_lab.report.canvas import WIDE

ROOT = Path(__file__).parents[2]


def main() -> None:
    record = json.loads((ROOT / "benchmarks/results/divide-pipeline-100mbit.json").read_text())
    row = next(row for row in record["results"] if row["config"] == "pipeline async")
    drawn = lanes(timed(spans(row)), WIDE, title="A step of a pipeline in two stages at 100 Mbit/s")
    (ROOT / "docs/pictures/pipeline.svg").write_text(drawn.alone())
