"""Draws docs/pictures/topk-assumption.svg from benchmarks/results/topk-assumption.json: ratio and loss by step.

python -m benchmarks topk-assumption; then this script.
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from matplotlib.lines import Line2D

from laconic_lab.report.canvas import Canvas, Size

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "benchmarks" / "results" / "topk-assumption.json"
TARGET = ROOT / "docs" / "pictures" / "topk-assumption.svg"
TITLE = "Assumption 1 of top-k: ‖TopK(mean) − mean of TopK‖ / ‖αG‖ (above) and the loss of the batch (below)"
PANEL, HEIGHT, LEFT, TOP, GAP = 250, 150, 64, 96, 52
STYLES = {0.001: 2, 0.01: 5, 0.1: 1, 1.0: 0}
POINTS = 60  # of a line: each is the mean of the steps around it
FLOOR = 1e-3  # of the ratio's axis; an exact zero is drawn there


def main() -> None:
    runs = json.loads(SOURCE.read_text())["runs"]
    names = list(dict.fromkeys(run["workload"] for run in runs))
    size = Size("wide", LEFT + len(names) * (PANEL + GAP + 12), TOP + 2 * HEIGHT + GAP + 30, 12)
    canvas = Canvas(size, TITLE)
    names_of = {style: "dense" if share >= 1 else f"K = {100 * share:g} %" for share, style in STYLES.items()}
    canvas.legend([(Line2D([], [], color=canvas.series_colour(style)), name) for style, name in names_of.items()])
    canvas.write(0, 42, f"{TITLE}, by step, logarithmic", "axis-title")
    for column, name in enumerate(names):
        own = [run for run in runs if run["workload"] == name]
        left = LEFT + column * (PANEL + GAP + 12)
        canvas.write(left, TOP - 12, f"{name}, {own[0]['numel']:,} weights, {own[0]['steps']:,} steps", "strong")
        panel(canvas, [run for run in own if run["share"] < 1], "ratio", left, TOP)
        panel(canvas, own, "loss", left, TOP + HEIGHT + GAP)
    TARGET.write_text(canvas.alone())
    print(f"wrote {TARGET.relative_to(ROOT)}")


def panel(canvas: Canvas, runs: list[dict[str, Any]], what: str, left: float, top: float) -> None:
    """The lines of one figure of several runs, over a logarithmic axis."""
    axes = canvas.axes(left, top, left + PANEL, top + HEIGHT)
    axes.set(xlim=(0, runs[0]["steps"]), yscale="log")
    for run in runs:
        line = [(x, max(FLOOR, y)) for x, y in smoothed(run[what])]
        canvas.line(axes, STYLES[run["share"]], line, linestyle="solid", linewidth=1.6)
    low, high = axes.get_ylim()
    powers = [10.0**power for power in range(-12, 12) if low <= 10.0**power <= high]
    canvas.ticks(axes.yaxis, powers, [f"{power:g}" for power in powers])
    canvas.ticks(axes.xaxis, [0, runs[0]["steps"]], ["0", f"{runs[0]['steps']:,}"], grid=False)


def smoothed(values: list[float]) -> list[tuple[float, float]]:
    """At most POINTS means over neighbouring steps, each at their middle."""
    count = min(POINTS, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [((a + b) / 2, sum(values[a:b]) / (b - a)) for a, b in pairwise(edges)]
