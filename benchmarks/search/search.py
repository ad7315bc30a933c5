"""Methods on published tables, populations, the search's cost, real searches, and kills."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.search import parts
from laconic.cli.shared import Json, count_option, echo_json, echo_table

STANDARD = parts.Asked()


def main(
    part: Annotated[list[str] | None, typer.Option(help=f"{', '.join(parts.PARTS)}; repeat it. Default: all.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="On tables; repeat it for more. Default: all.")] = None,
    workload: Annotated[list[str] | None, typer.Option(help="Of real searches; repeat it for more.")] = None,
    evaluations: Annotated[int, count_option("Of each search on a table.")] = STANDARD.evaluations,
    repeats: Annotated[int, count_option("Searches of each method on a table.")] = STANDARD.repeats,
    slow_repeats: Annotated[int, count_option("The same for Optuna's methods.")] = STANDARD.slow_repeats,
    seed: Annotated[int, count_option("Of the first search, the first pair, and the kills.", least=0)] = STANDARD.seed,
    pairs: Annotated[int, count_option("Searches by pbt and by random.")] = STANDARD.pairs,
    processes: Annotated[int, count_option("That share the searches on tables.")] = STANDARD.processes,
    kills: Annotated[int, count_option("In all.")] = STANDARD.kills,
    json: Json = False,
) -> None:
    """Compare methods on NAS-Bench-201 and NAS-Bench-Macro, which are read from LACONIC_DATA; train; kill searches."""
    record = parts.run(parts.Asked(
        part or STANDARD.parts, method or STANDARD.methods, evaluations, repeats, slow_repeats, seed, pairs, processes,
        kills, workload or STANDARD.workloads,
    ))  # fmt: skip
    if json:
        return echo_json(record)
    if record["results"]:
        headings = ("space", "method", "searches", "best, mean", "95 %", "optimum found")
        echo_table(headings, [_cells(row) for row in record["results"]])
    for row in [*record.get("cost", []), *record.get("stale", []), *([record["kills"]] if "kills" in record else [])]:
        shown = {key: value for key, value in row.items() if not isinstance(value, list)}
        typer.echo("  ".join(f"{key} {value:.3g}" if isinstance(value, float) else f"{key} {value}"
                             for key, value in shown.items()))  # fmt: skip


def _cells(row: dict[str, Any]) -> list[str]:
    low, high = row.get("interval", (row["best_mean"], row["best_mean"]))
    rate = row.get("optimum_found_rate")
    return [row["space"], row["method"], str(row.get("repeats", 1)), f"{row['best_mean']:.3f}", f"{low:.3f}–{high:.3f}",
            "" if rate is None else f"{rate:.0%}"]  # fmt: skip
