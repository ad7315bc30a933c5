"""`laconic bench search`: methods on published tables, population-based training on its toy, and the search's cost."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic.cli.shared import Json, echo_json, echo_table
from laconic.search import bench


def search(
    evaluations: Annotated[int, typer.Option(help="Of each search on a table.")] = 200,
    repeats: Annotated[int, typer.Option(help="Searches of each method.")] = 200,
    slow_repeats: Annotated[int, typer.Option(help="Searches of Optuna's methods, whose points cost time.")] = 50,
    method: Annotated[list[str] | None, typer.Option(help="Repeat it for more. Default: all that suit tables.")] = None,
    processes: Annotated[int, typer.Option(help="That share the searches.")] = 1,
    json: Json = False,
) -> None:
    """Compare methods on NAS-Bench-201 and NAS-Bench-Macro, which are read from LACONIC_DATA."""
    record = bench.run(method or bench.METHODS, evaluations, repeats, slow_repeats, processes)
    if json:
        return echo_json(record)
    headings = ("space", "method", "searches", "best, mean", "95 %", "optimum found")
    echo_table(headings, [_cells(row) for row in record["results"]])
    for row in record["cost"]:
        typer.echo("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                             for key, value in row.items()))  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row.get("interval", (row["best_mean"], row["best_mean"]))
    rate = row.get("optimum_found_rate")
    return [row["space"], row["method"], str(row.get("repeats", 1)), f"{row['best_mean']:.3f}", f"{low:.3f}–{high:.3f}",
            "" if rate is None else f"{rate:.0%}"]  # fmt: skip
