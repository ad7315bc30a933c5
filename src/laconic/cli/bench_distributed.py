"""`laconic bench distributed`: training on several workers beside one process alone, and bytes beside predicted."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic.cli.tables import echo_json
from laconic.errors import BadInput
from laconic.lab.bench.distributed import measure
from laconic.lab.clusters.launch import run_job


def distributed(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Local ranks; ignored under torchrun or mpiexec.")] = 4,
    engine: Annotated[str | None, typer.Option(help="gloo, mpi or zmq.")] = None,
    steps: Annotated[int, typer.Option(help="Steps of training for each exchange.")] = 10,
    seed: Annotated[int, typer.Option(help="Of weights and data order.")] = 0,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train on N ranks by every exchange; compare weights with one process alone, and bytes with those predicted."""
    if steps < 1:
        raise BadInput(f"--steps must be at least 1, got {steps}")
    record = run_job(ranks, engine, measure, (steps, seed), timeout_s=600)
    if record is None:
        return
    if json:
        echo_json(record)
    else:
        for line in table(record):
            typer.echo(line)
    if not all(row["passed"] for row in record["results"]):
        raise typer.Exit(1)


def table(record: dict[str, Any]) -> list[str]:
    """The record as lines; distances are in units of what float32 costs a single process."""
    unit = record["sequential_error"]
    lines = [
        f"{record['workload']}, {record['steps']} steps, {record['world_size']} ranks on {record['engine']}; "
        f"one process in float32 ends {unit:.1e} from float64, relatively",
        f"{'codec':<10} {'algorithm':<13} {'times as far':>12} {'sent by a rank':>16} {'predicted':>12} replicas",
    ]
    for row in record["results"]:
        counted, expected = row["counted_nbytes"], row["predicted_nbytes"]
        sent = "not counted" if counted is None else f"{max(counted):,} B"
        told = "" if expected is None else ("the same" if counted == expected else f"{max(expected):,} B")
        same = "identical" if row["replicas_identical"] else "DIFFER"
        end = same if row["passed"] else f"{same}  FAILS"
        far = row["error"] / unit
        lines.append(f"{row['codec']:<10} {row['algorithm']:<13} {far:>12.3g} {sent:>16} {told:>12} {end}")
    return lines
