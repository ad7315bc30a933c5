"""Predicted steps beside measured ones."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from benchmarks.planner.groups import GROUPS, QUICK, bench
from laconic import words
from laconic.cli.shared import Json, count_option, echo_json, echo_table
from laconic.errors import BadInput
from laconic.storage.files import cache_folder


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Two set-ups without emulated links, for a look.")] = False,
    only: Annotated[str, typer.Option(help="Only groups whose name contains this, such as 'mnist-lenet × 4'.")] = "",
    keep: Annotated[Path | None, typer.Option(help="Keep measurements here; those in it are not repeated.")] = None,
    blocks: Annotated[int, count_option("Turns of each way.")] = 4,
    memory: Annotated[bool, typer.Option(help="Measure the peak memory of five models, too.")] = True,
    json: Json = False,
) -> None:
    """Predict and measure some 200 set-ups (15 minutes, root); what is fitted is kept for laconic plan."""
    groups = [group for group in (QUICK if quick else GROUPS) if only in str(group)]
    if not groups:
        raise BadInput(f"no group is called '{only}'; there are {'; '.join(map(str, GROUPS))}")
    record = bench(groups, blocks, memory, keep, cache_folder())
    if json:
        return echo_json(record)
    rows = []
    for row in record["results"]:
        error = row["predicted_seconds"] / row["measured_seconds"] - 1
        cells = (row["setup"], "held out" if row["held_out"] else "", words.seconds(row["predicted_seconds"]),
                 f"{words.seconds(row['low'])} – {words.seconds(row['high'])}", words.seconds(row["measured_seconds"]),
                 f"{100 * error:+.0f} %")  # fmt: skip
        rows.append([words.plain(cell) for cell in cells])
    echo_table(("set-up", "", "predicted", "from – to", "measured", "error"), rows)
    for row in record["memory"]:
        typer.echo(words.plain(
            f"memory of {row['model']} × {row['batch']}: predicted {words.nbytes(row['predicted_nbytes'])}, measured "
            f"{words.nbytes(row['measured_nbytes'])} ({100 * row['error']:+.1f} %)"
        ))  # fmt: skip
    regret, median, high = record["regret"], 100 * record["median_error"], 100 * record["p90_error"]
    typer.echo(
        f"held out: median error {median:.0f} %, 90th percentile {high:.0f} %, intervals hold "
        f"{100 * record['coverage']:.0f} %; the choice is within 5 % of the best in "
        f"{100 * regret['within_5_percent']:.0f} % of {regret['groups']} cases, at worst "
        f"{regret['worst_over_ddp']:.2f} × DDP"
    )
    peers = ", ".join(f"{name} {100 * error:.3g} %" for name, error in record["peers"].items())
    typer.echo(f"published errors of peers, on other machines: {peers}")
