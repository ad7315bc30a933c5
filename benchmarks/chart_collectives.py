"""Draws docs/collectives.svg from benchmarks/results/collectives-gloo-4.json: each algorithm's time relative to native.

laconic bench collectives -n 4 --json > benchmarks/results/collectives-gloo-4.json; then this script.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks" / "results" / "collectives-gloo-4.json"
TARGET = ROOT / "docs" / "collectives.svg"
COLOURS = {  # Okabe and Ito's, told apart by most eyes
    "butterfly": "#0072B2",
    "direct": "#E69F00",
    "hierarchical": "#CC79A7",
    "rabenseifner": "#009E73",
    "ring": "#D55E00",
    "tree": "#56B4E9",
    "native": "#777777",
}
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 720, 380, 64, 150, 34, 56


def main() -> None:
    record = json.loads(SOURCE.read_text())
    seconds = {(row["algorithm"], row["numel"]): row["seconds"] for row in record["results"]}
    numels = sorted({row["numel"] for row in record["results"]})
    names = [name for name in COLOURS if (name, numels[0]) in seconds]
    ratios = {name: [seconds[name, n] / seconds["native", n] for n in numels] for name in names}
    low = min(0.5, *(r for row in ratios.values() for r in row)) * 0.95
    high = max(2.0, *(r for row in ratios.values() for r in row)) * 1.05

    def x(numel: int) -> float:
        share = math.log(numel / numels[0]) / math.log(numels[-1] / numels[0])
        return LEFT + share * (WIDTH - LEFT - RIGHT)

    def y(ratio: float) -> float:
        return TOP + (math.log(high / ratio) / math.log(high / low)) * (HEIGHT - TOP - BOTTOM)

    picks = {pick["numel"]: pick["pick"] for pick in record["auto"]}
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        f'<text x="{LEFT}" y="18" font-size="14">All-reduce over {record["world_size"]} ranks on {record["engine"]}: '
        "time relative to the engine's own (lower is better)</text>",
    ]
    parts += [
        f'<line x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(ratio):.1f}" y2="{y(ratio):.1f}" stroke="#ddd"/>'
        f'<text x="{LEFT - 8}" y="{y(ratio) + 4:.1f}" text-anchor="end">{ratio:g}×</text>'
        for ratio in (0.1, 0.2, 0.5, 1, 2, 5, 10)
        if low <= ratio <= high
    ]
    parts += [
        f'<text x="{x(n):.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">1e{round(math.log10(n))}</text>'
        for n in numels
    ]
    middle = (LEFT + WIDTH - RIGHT) / 2
    parts.append(f'<text x="{middle}" y="{HEIGHT - 12}" text-anchor="middle">float32 values in the buffer</text>')
    for name in names:
        points = " ".join(f"{x(n):.1f},{y(r):.1f}" for n, r in zip(numels, ratios[name], strict=True))
        dash = ' stroke-dasharray="5 4"' if name == "native" else ""
        parts.append(f'<polyline points="{points}" fill="none" stroke="{COLOURS[name]}" stroke-width="2"{dash}/>')
        for n, r in zip(numels, ratios[name], strict=True):
            ring = "3.5" if picks.get(n) != name else "7"
            fill = COLOURS[name] if picks.get(n) != name else "none"
            parts.append(
                f'<circle cx="{x(n):.1f}" cy="{y(r):.1f}" r="{ring}" fill="{fill}" stroke="{COLOURS[name]}" '
                'stroke-width="2"/>'
            )
    for i, name in enumerate(names):
        top = TOP + 14 + 20 * i
        parts.append(
            f'<line x1="{WIDTH - RIGHT + 18}" x2="{WIDTH - RIGHT + 40}" y1="{top}" y2="{top}" stroke="{COLOURS[name]}" '
            f'stroke-width="2"/><text x="{WIDTH - RIGHT + 46}" y="{top + 4}">{name}</text>'
        )
    top = TOP + 14 + 20 * len(names)
    parts.append(
        f'<circle cx="{WIDTH - RIGHT + 29}" cy="{top}" r="7" fill="none" stroke="#333" stroke-width="2"/>'
        f'<text x="{WIDTH - RIGHT + 46}" y="{top + 4}">what auto picks</text></svg>'
    )
    TARGET.write_text("\n".join(parts) + "\n")
    print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
