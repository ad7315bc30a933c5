"""Draws docs/exchange.svg from benchmarks/results/exchange-4-hosts.json: the time of a training step, by link.

python benchmarks/bench_exchange.py … --output benchmarks/results/exchange-4-hosts.json; then this script.
"""

from __future__ import annotations

import json
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "benchmarks" / "results" / "exchange-4-hosts.json"
TARGET = ROOT / "docs" / "exchange.svg"
WIDTH, LEFT, RIGHT, TOP, ROW, GAP = 760, 236, 216, 54, 20, 40
FLOOR, PEER, OURS = "#777777", "#E69F00", "#0072B2"  # Okabe and Ito's, told apart by most eyes


def main() -> None:
    record = json.loads(SOURCE.read_text())
    links = [link for link in record["links"] if link["link"] != "unlimited"]
    parts, top = [], TOP
    for link in links:
        rows = link["results"]
        longest = max(row["step_seconds"] for row in rows)
        rate = link["link"].replace("gbit", " Gbit/s").replace("mbit", " Mbit/s")
        title = f"{rate} between {link['hosts']} hosts"
        parts.append(f'<text x="{LEFT}" y="{top - 8}" font-weight="bold">{title}</text>')
        for row in rows:
            name, width = row["configuration"], row["step_seconds"] / longest * (WIDTH - LEFT - RIGHT)
            colour = FLOOR if name == "no communication" else PEER if name.startswith("ddp") else OURS
            ratio = "" if colour == FLOOR else f"{row['speedup_over_ddp']:.2g} × ddp, loss {row['loss']:.2f}"
            parts.append(
                f'<text x="{LEFT - 8}" y="{top + 13}" text-anchor="end">{name}</text>'
                f'<rect x="{LEFT}" y="{top + 2}" width="{width:.1f}" height="{ROW - 5}" fill="{colour}"/>'
                f'<text x="{LEFT + width + 6:.1f}" y="{top + 13}">{1e3 * row["step_seconds"]:.0f} ms  {ratio}</text>'
            )
            top += ROW
        top += GAP
    height = top - GAP + 34
    legend = "grey: no communication; orange: torch's DDP and its hooks; blue: Laconic. Loss after the same steps."
    title = "A training step of 784-1024-1024-10, batch 64 a worker (shorter is better)"
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        f'font-family="sans-serif" font-size="12"><rect width="{WIDTH}" height="{height}" fill="white"/>'
        f'<text x="12" y="20" font-size="14">{title}</text>'
    )
    foot = f'<text x="12" y="{height - 10}">{legend}</text></svg>'
    TARGET.write_text("\n".join([head, *parts, foot]) + "\n")
    print(f"wrote {TARGET.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
