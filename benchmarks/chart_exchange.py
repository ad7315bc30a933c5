"""Draws the time of a training step by link: docs/exchange.svg and docs/step.svg, from benchmarks/results.

python benchmarks/bench_exchange.py … --output benchmarks/results/exchange-4-hosts.json     its four hosts
python benchmarks/bench_overlap.py --output benchmarks/results/overlap.json      a small GPT on two; then this
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
RESULTS, DOCS = ROOT / "benchmarks" / "results", ROOT / "docs"
WIDTH, LEFT, RIGHT, TOP, ROW, GAP = 760, 236, 216, 54, 20, 40
FLOOR, PEER, OURS = "#777777", "#E69F00", "#0072B2"  # Okabe and Ito's, told apart by most eyes
LEGEND = "grey: no communication; orange: torch's DDP and its hooks; blue: Laconic. Loss after the same steps."


class Bar(NamedTuple):
    """A configuration's step; no loss where nothing is exchanged."""

    name: str
    seconds: float
    loss: float | None


def draw(groups: dict[str, list[Bar]], title: str, target: Path) -> None:
    """Bars in groups, one a link; each group has its own scale and a bar called "ddp"."""
    parts, top = [], TOP
    for name, bars in groups.items():
        longest, ddp = max(bar.seconds for bar in bars), next(bar.seconds for bar in bars if bar.name == "ddp")
        parts.append(f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{name}</text>')
        for bar in bars:
            width = bar.seconds / longest * (WIDTH - LEFT - RIGHT)
            colour = FLOOR if bar.loss is None else PEER if bar.name.startswith("ddp") else OURS
            ratio = "" if bar.loss is None else f"{ddp / bar.seconds:.2g} × ddp, loss {bar.loss:.2f}"
            parts.append(
                f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end">{bar.name}</text>'
                f'<rect x="{LEFT}" y="{top + 2}" width="{width:.1f}" height="{ROW - 5}" fill="{colour}"/>'
                f'<text x="{LEFT + width + 6:.1f}" y="{top + 13}">{1e3 * bar.seconds:.0f} ms  {ratio}</text>'
            )
            top += ROW
        top += GAP
    height = top - GAP + 34
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>'
        f'<text x="12" y="20" font-size="14">{title}</text>'
    )
    foot = f'<text x="12" y="{height - 10}">{LEGEND}</text></svg>'
    target.write_text("\n".join([head, *parts, foot]) + "\n")
    print(f"wrote {target.relative_to(ROOT)}")


def rate(link: str) -> str:
    return link.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s").replace("loopback", "no limit")


def exchange() -> None:
    groups = {}
    for link in json.loads((RESULTS / "exchange-4-hosts.json").read_text())["links"]:
        if link["link"] != "unlimited":
            groups[f"{rate(link['link'])} between {link['hosts']} hosts"] = [
                Bar(name, row["step_seconds"], None if name == "no communication" else row["loss"])
                for row in link["results"]
                for name in [row["configuration"]]
            ]
    draw(groups, "A training step of 784-1024-1024-10, batch 64 a worker (shorter is better)", DOCS / "exchange.svg")


def step() -> None:
    groups = {}
    for table in json.loads((RESULTS / "overlap.json").read_text())["tables"].values():
        if table["set"] == "gpt":
            told = table["configuration"]
            groups[f"{rate(told['link'])} between {told['hosts']} hosts"] = [
                Bar("no communication", table["alone"]["step_seconds"], None),
                *(Bar(row["config"], row["step_seconds"], row["loss"]) for row in table["results"]),
            ]
    draw(groups, "A training step of a small GPT, 3.2 million weights (shorter is better)", DOCS / "step.svg")


if __name__ == "__main__":
    exchange()
    if (RESULTS / "overlap.json").exists():
        step()
