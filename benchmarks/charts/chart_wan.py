"""Draws seconds to a loss over the link's rate, a line for each configuration, from the record of `benchmarks wan`.

python -m benchmarks wan; then this. Steps to the loss times a measured step on each link; DDP's likewise.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.wide.tables import time_rows
from benchmarks.wide.wan import OUTPUT, WanRecord
from laconic.errors import BadInput
from laconic.schedules.link import Link
from laconic_lab.report.canvas import WIDE, Canvas
from laconic_lab.report.charts import ChartAxis, Series, curves

TARGET = Path(__file__).parents[2] / "docs" / "pictures" / "wan.svg"


def drawn(content: Mapping[str, Any], workload: str) -> Canvas:
    """The chart of one workload: its longest trainings, on all links that were measured.

    Raises:
        BadInput: no configuration has both steps and losses.
    """
    rows = [row for row in time_rows(content) if row["workload"] == workload]
    if not rows:
        raise BadInput(f"no time to a loss of '{workload}' is known: measure it by python -m benchmarks wan")
    steps, lines = max(row["steps"] for row in rows), dict[str, dict[float, float]]()
    for row in rows:
        rate_bps = Link.parse(row["link"]).rate_bps
        if row["steps"] == steps and rate_bps is not None:
            lines.setdefault(row["config"], {})[rate_bps / 1e6] = row["seconds_to_loss"]
    ideal = min(row["seconds_to_loss"] / row["times_infinite_ddp"] for row in rows if row["steps"] == steps)
    rates = sorted({rate for line in lines.values() for rate in line})
    series = [Series(name, style, sorted(line.items())) for style, (name, line) in enumerate(sorted(lines.items()))]
    series.append(Series("DDP on an infinite network", len(series), [(rate, ideal) for rate in rates]))
    title = f"{workload}: seconds to the loss of DDP after {steps // 2} steps (lower is better)"
    x, y = ChartAxis("Mbit/s (logarithmic)", "log"), ChartAxis(f"{title}, logarithmic", "log")
    return curves(series, x, y, WIDE, title=title)


def main(
    workload: Annotated[str, typer.Option(help="Which of the record's.")] = "shakespeare-gpt",
    record: Annotated[Path, typer.Option(help="Of python -m benchmarks wan.")] = OUTPUT,
    output: Annotated[Path, typer.Option(help="The SVG to write.")] = TARGET,
) -> None:
    """Draw seconds to a loss over the link's rate."""
    if not record.exists():
        raise BadInput(f"there is no record '{record}': run python -m benchmarks wan first")
    output.write_text(drawn(WanRecord(record).content, workload).alone())
    typer.echo(f"wrote {output}")
