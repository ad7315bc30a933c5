"""Draws docs/codecs/topk-assumption.svg from benchmarks/results/topk-assumption.json: the ratio and the loss, by step.

python benchmarks/bench_topk_assumption.py; then this script.
"""

from __future__ import annotations

import json
import math
from itertools import pairwise
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks" / "results" / "topk-assumption.json"
TARGET = ROOT / "docs" / "codecs" / "topk-assumption.svg"
PANEL, HEIGHT, LEFT, TOP, GAP = 250, 150, 64, 84, 52
COLOURS = {0.001: "#D55E00", 0.01: "#E69F00", 0.1: "#0072B2", 1.0: "#777777"}  # Okabe and Ito's
POINTS = 60  # of a line: each is the mean of the steps around it
FLOOR = 1e-3  # of the ratio's axis; an exact zero is drawn there


def main() -> None:
    runs = json.loads(SOURCE.read_text())["runs"]
    names = list(dict.fromkeys(run["workload"] for run in runs))
    parts = []
    for column, name in enumerate(names):
        own = [run for run in runs if run["workload"] == name]
        left = LEFT + column * (PANEL + GAP + 12)
        title = f"{name}, {own[0]['numel']:,} weights, {own[0]['steps']:,} steps"
        parts.append(f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{title}</text>')
        parts += panel([run for run in own if run["share"] < 1], "ratio", left, TOP)
        parts += panel(own, "loss", left, TOP + HEIGHT + GAP)
    width = LEFT + len(names) * (PANEL + GAP + 12)
    height = TOP + 2 * HEIGHT + GAP + 60
    labels = [("dense" if share >= 1 else f"K = {100 * share:g} %", colour) for share, colour in COLOURS.items()]
    legend = "".join(
        f'<rect x="{LEFT + 110 * i}" y="{height - 26}" width="16" height="4" fill="{colour}"/>'
        f'<text x="{LEFT + 22 + 110 * i}" y="{height - 20}">{label}</text>'
        for i, (label, colour) in enumerate(labels)
    )
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        f'font-size="12"><rect width="{width}" height="{height}" fill="white"/>'
        '<text x="12" y="22" font-size="14">Assumption 1 of top-k: ‖TopK(mean) − mean of TopK‖ / ‖αG‖ (above) and '
        'the loss of the batch (below)</text><text x="12" y="40">by step; both axes of values are logarithmic</text>'
    )
    TARGET.write_text("\n".join([head, *parts, legend, "</svg>"]) + "\n")
    print(f"wrote {TARGET.relative_to(ROOT)}")


def panel(runs: list[dict[str, Any]], what: str, left: float, top: float) -> list[str]:
    """The lines of one figure of several runs, in a frame with a logarithmic axis."""
    curves = {run["share"]: smoothed(run[what]) for run in runs}
    values = [max(FLOOR, y) for curve in curves.values() for _, y in curve]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)) + 1e-9)
    steps = runs[0]["steps"]
    drawn = [f'<rect x="{left}" y="{top}" width="{PANEL}" height="{HEIGHT}" fill="none" stroke="#999999"/>']
    for power in range(low, high + 1):
        y = top + HEIGHT * (high - power) / (high - low)
        drawn.append(f'<line x1="{left}" x2="{left + PANEL}" y1="{y:.1f}" y2="{y:.1f}" stroke="#dddddd"/>')
        drawn.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{10.0**power:g}</text>')
    for x, label in ((left, "0"), (left + PANEL, f"{steps:,}")):
        drawn.append(f'<text x="{x}" y="{top + HEIGHT + 15}" text-anchor="middle">{label}</text>')
    for share, curve in curves.items():
        places = [(left + PANEL * x / steps, top + HEIGHT * (high - math.log10(max(FLOOR, y))) / (high - low))
                  for x, y in curve]  # fmt: skip
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        drawn.append(f'<polyline points="{line}" fill="none" stroke="{COLOURS[share]}" stroke-width="1.6"/>')
    return drawn


def smoothed(values: list[float]) -> list[tuple[float, float]]:
    """At most POINTS means over neighbouring steps, each at their middle."""
    count = min(POINTS, len(values))
    edges = [round(i * len(values) / count) for i in range(count + 1)]
    return [((a + b) / 2, sum(values[a:b]) / (b - a)) for a, b in pairwise(edges)]


if __name__ == "__main__":
    main()
