"""Draws docs/operators.svg from benchmarks/results/operators-ladder.json: a convolution from loops to Winograd.

laconic bench operators --ladder --json > benchmarks/results/operators-ladder.json; then this script.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks" / "results" / "operators-ladder.json"
TARGET = ROOT / "docs" / "operators.svg"
WIDTH, LEFT, RIGHT, TOP, ROW = 720, 130, 130, 44, 26


def main() -> None:
    rungs = json.loads(SOURCE.read_text())["ladder"]
    most = max(rung["gflops"] for rung in rungs)
    height = TOP + ROW * len(rungs) + 16
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{LEFT}" y="20" font-size="14">64 → 64 channels, 56×56, 3×3, one thread: 10⁹ operations of the '
        "definition a second</text>",
    ]
    for i, rung in enumerate(rungs):
        y, length = TOP + ROW * i, (WIDTH - LEFT - RIGHT) * rung["gflops"] / most
        colour = "#777777" if rung["name"] == "torch" else "#0072B2"
        parts += [
            f'<text x="{LEFT - 8}" y="{y + 13}" text-anchor="end">{rung["name"]}</text>',
            f'<rect x="{LEFT}" y="{y}" width="{length:.1f}" height="18" fill="{colour}"/>',
            f'<text x="{LEFT + length + 6:.1f}" y="{y + 13}">{rung["gflops"]:.0f}, {rung["speedup"]:.2f}× torch</text>',
        ]
    TARGET.write_text("\n".join([*parts, "</svg>"]) + "\n")


if __name__ == "__main__":
    main()
