"""Draws docs/pictures/collectives.svg from benchmarks/results/collectives-gloo-4.json: times relative to native.

laconic bench collectives -n 4 --json > benchmarks/results/collectives-gloo-4.json; then this script.
"""

from __future__ import annotations

import json
from pathlib import Path

from laconic_lab.report.canvas import WIDE
from laconic_lab.report.charts import ChartAxis, Series, curves

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "benchmarks" / "results" / "collectives-gloo-4.json"
TARGET = ROOT / "docs" / "pictures" / "collectives.svg"
NAMES = ("native", "butterfly", "direct", "hierarchical", "rabenseifner", "ring", "tree")


def main() -> None:
    record = json.loads(SOURCE.read_text())
    seconds = {(row["algorithm"], row["numel"]): row["seconds"] for row in record["results"]}
    numels = sorted({row["numel"] for row in record["results"]})
    ratios = {
        name: [(float(n), seconds[name, n] / seconds["native", n]) for n in numels]
        for name in NAMES if (name, numels[0]) in seconds
    }  # fmt: skip
    picked = [(float(pick["numel"]), dict(ratios[pick["pick"]])[pick["numel"]]) for pick in record["auto"]]
    series = [Series(name, style, line) for style, (name, line) in enumerate(ratios.items())]
    title = (f"All-reduce over {record['world_size']} ranks on {record['engine']}: "
             "time relative to the engine's own (lower is better)")  # fmt: skip
    x = ChartAxis("float32 values in the buffer (logarithmic)", "log")
    y = ChartAxis(f"{title}, logarithmic", "log", "{:g}×".format)
    drawn = curves([*series, Series("what auto picks", 7, picked, joined=False)], x, y, WIDE, title=title)
    TARGET.write_text(drawn.alone())
    print(f"wrote {TARGET.relative_to(ROOT)}")
