"""`laconic demo`: the first thing to run."""

from __future__ import annotations

import json as json_module
import sys
from typing import Annotated, Any

import typer

from laconic.lab.demo import measure
from laconic.lab.jobs import run_job


def demo(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Local ranks.")] = 4,
    engine: Annotated[str | None, typer.Option(help="gloo, mpi or zmq.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Sum real gradients over N local processes by every algorithm; check, time and count each one."""
    record = run_job(ranks, engine, measure, ())
    if record is None:
        return
    if json:
        typer.echo(json_module.dumps(record))
    else:
        for line in _table(record):
            typer.echo(line)
    if not all(row["right"] and row["sent_nbytes"] == row["formula_nbytes"] for row in record["rows"]):
        typer.echo("laconic: a sum or a byte count is wrong", err=True)
        sys.exit(1)


def _table(record: dict[str, Any]) -> list[str]:
    lines = [
        f"gradients of a digits network, {record['numel']} float32 values, summed over {record['world_size']} "
        f"processes on {record['engine']}",
        f"{'algorithm':<13} {'sum':<6} {'measured':>12} {'predicted':>12} {'bytes sent':>12} {'by formula':>12}",
    ]
    for row in record["rows"]:
        sent = "" if row["sent_nbytes"] is None else str(row["sent_nbytes"])
        formula = "" if row["formula_nbytes"] is None else str(row["formula_nbytes"])
        lines.append(
            f"{row['algorithm']:<13} {'right' if row['right'] else 'WRONG':<6} {row['seconds'] * 1e3:9.3f} ms "
            f"{row['predicted_seconds'] * 1e3:9.3f} ms {sent:>12} {formula:>12}"
        )
    lines.append(f"auto picks {record['pick']} here; predictions come from a 2 s probe of this machine")
    return lines
