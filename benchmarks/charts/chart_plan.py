"""Draws docs/pictures/plan.svg: AlexNet's step by number of machines and kind of division, as planned."""

from __future__ import annotations

from pathlib import Path

from laconic.planner.plan import Asked, crossings, scale
from laconic_lab.report.canvas import WIDE
from laconic_lab.report.charts import ChartAxis, Series, curves

ASKED = Asked(256, "10gbit,20us", batch=1024, device="v100", quality="exact")
KINDS = ("data", "tensor", "pipeline", "hybrid")


def main() -> None:
    points = scale("alexnet", ASKED)
    series = [
        Series(kind, style, [(float(p.ranks), 1e3 * p.seconds[kind]) for p in points if kind in p.seconds])
        for style, kind in enumerate(KINDS, 1)
    ]
    x = ChartAxis("machines (logarithmic)", "log")
    y = ChartAxis("time of a step (ms, logarithmic)", "log")
    drawn = curves(series, x, y, WIDE, title="Time of a step of AlexNet by number of machines, simulated")
    Path(__file__).parents[2].joinpath("docs/pictures/plan.svg").write_text(drawn.alone())
    print("\n".join(crossings(points)))
