"""Draws docs/pictures/operators.svg from benchmarks/results/operators-ladder.json: convolution methods.

python -m benchmarks operators --ladder --json > benchmarks/results/operators-ladder.json; then this script.
"""

from __future__ import annotations

import json
from pathlib import Path

from laconic_lab.report.canvas import Canvas, Size

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "benchmarks" / "results" / "operators-ladder.json"
TARGET = ROOT / "docs" / "pictures" / "operators.svg"
TITLE = "64 → 64 channels, 56×56, 3×3, one thread: 10⁹ operations of the definition a second"
LEFT, RIGHT, TOP, ROW = 130.0, 130.0, 34.0, 26.0


def main() -> None:
    rungs = json.loads(SOURCE.read_text())["ladder"]
    height = ROW * len(rungs)
    size = Size("wide", 720, int(TOP + height), 13)
    canvas = Canvas(size, TITLE)
    canvas.write(0, 16, TITLE, "axis-title")
    axes = canvas.axes(LEFT, TOP, size.width - RIGHT, TOP + height)
    axes.set(xlim=(0, max(rung["gflops"] for rung in rungs)), ylim=(height, 0))
    axes.set_axis_off()
    for number, rung in enumerate(rungs):
        y, end = ROW * number + 9, (size.width - LEFT - RIGHT) * rung["gflops"] / axes.get_xlim()[1]
        axes.barh(y, rung["gflops"], 18, color=canvas.colour("wait" if rung["name"] == "torch" else "s1"))
        canvas.write(LEFT - 8, TOP + y + 4, rung["name"], "ink", ha="right")
        canvas.write(LEFT + end + 6, TOP + y + 4, f"{rung['gflops']:.0f}, {rung['speedup']:.2f}× torch", "ink")
    TARGET.write_text(canvas.alone())
