"""Draws the time of a training step by link: exchange.svg and step.svg in docs/pictures, from benchmarks/results.

python -m benchmarks exchange … --output benchmarks/results/exchange-4-hosts.json     its four hosts
python -m benchmarks overlap --output benchmarks/results/overlap.json      a small GPT on two; then this
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

from matplotlib.patches import Patch

from laconic_lab.report.canvas import Canvas, Size

ROOT = Path(__file__).parents[2]
RESULTS, PICTURES = ROOT / "benchmarks" / "results", ROOT / "docs" / "pictures"
SIZE = Size("wide", 760, 0, 13)
LEFT, RIGHT, ROW, GAP = 236.0, 276.0, 20.0, 44.0
ALONE = "computing alone"
COLOURS = {ALONE: "wait", "torch's DDP and its hooks": "encode", "Laconic": "s1"}


class Bar(NamedTuple):
    """A configuration's step; no loss where nothing is exchanged."""

    name: str
    seconds: float
    loss: float | None

    @property
    def whose(self) -> str:
        """Its entry of the legend."""
        if self.loss is None:
            return ALONE
        return "torch's DDP and its hooks" if self.name.startswith("ddp") else "Laconic"


def draw(groups: dict[str, list[Bar]], title: str, target: Path) -> None:
    """Bars in groups, one a link; each group has its own scale and a bar called "ddp"."""
    canvas = Canvas(SIZE, title)
    height = sum(ROW * len(bars) + GAP for bars in groups.values())
    top = canvas.legend([(Patch(color=canvas.colour(colour)), name) for name, colour in COLOURS.items()])
    canvas.resize(top + 24 + height)
    canvas.write(0, top + 18, f"{title}; loss after the same steps", "axis-title")
    top += 24 + GAP
    for name, bars in groups.items():
        canvas.write(LEFT, top - 8, name, "strong")
        axes = canvas.axes(LEFT, top, SIZE.width - RIGHT, top + ROW * len(bars))
        axes.set(xlim=(0, max(bar.seconds for bar in bars)), ylim=(ROW * len(bars), 0))
        axes.set_axis_off()
        ddp = next(bar.seconds for bar in bars if bar.name == "ddp")
        for number, bar in enumerate(bars):
            y, colour = ROW * number + 9.5, canvas.colour(COLOURS[bar.whose])
            axes.barh(y, bar.seconds, ROW - 5, color=colour)
            end = LEFT + (SIZE.width - LEFT - RIGHT) * bar.seconds / axes.get_xlim()[1]
            canvas.write(LEFT - 8, top + y + 4, bar.name, "ink", ha="right")
            canvas.write(end + 6, top + y + 4, f"{1e3 * bar.seconds:.0f} ms{beside(bar, ddp)}", "ink")
        top += ROW * len(bars) + GAP
    target.write_text(canvas.alone())
    print(f"wrote {target.relative_to(ROOT)}")


def beside(bar: Bar, ddp_s: float) -> str:
    """How much faster than DDP a configuration is, where two digits show it, and its loss."""
    if bar.loss is None:
        return ""
    ratio = ddp_s / bar.seconds
    if f"{ratio:.2g}" == "1":
        return f" · loss {bar.loss:.2f}"
    told = f"{ratio:.2g} × faster" if ratio > 1 else f"{1 / ratio:.2g} × slower"
    return f" · {told} than DDP, loss {bar.loss:.2f}"


def rate(link: str) -> str:
    return link.replace("gbit", " Gbit/s").replace("mbit", " Mbit/s").replace("loopback", "no limit")


def exchange() -> None:
    groups = {}
    for link in json.loads((RESULTS / "exchange-4-hosts.json").read_text())["links"]:
        if link["link"] != "unlimited":
            groups[f"{rate(link['link'])} between {link['hosts']} hosts"] = [
                Bar(ALONE, row["step_seconds"], None)
                if row["configuration"] == "no communication"
                else Bar(row["configuration"], row["step_seconds"], row["loss"])
                for row in link["results"]
            ]
    title = "A training step of 784-1024-1024-10, batch 64 a worker (shorter is better)"
    draw(groups, title, PICTURES / "exchange.svg")


def step() -> None:
    groups = {}
    for table in json.loads((RESULTS / "overlap.json").read_text())["tables"].values():
        if table["set"] == "gpt":
            told = table["configuration"]
            groups[f"{rate(told['link'])} between {told['hosts']} hosts"] = [
                Bar(ALONE, table["alone"]["step_seconds"], None),
                *(Bar(row["config"], row["step_seconds"], row["loss"]) for row in table["results"]),
            ]
    draw(groups, "A training step of a small GPT, 3.2 million weights (shorter is better)", PICTURES / "step.svg")


def main() -> None:
    """Draw both charts, the second where its record is there."""
    exchange()
    if (RESULTS / "overlap.json").exists():
        step()
