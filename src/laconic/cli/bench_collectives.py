"""`laconic bench collectives`: every all-reduce algorithm beside the engine's own."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic.cli.tables import echo_json
from laconic.errors import BadInput
from laconic.lab.bench.collectives import NUMELS, measure
from laconic.lab.clusters.launch import run_job


def collectives(
    ranks: Annotated[int, typer.Option("-n", "--ranks", help="Local ranks; ignored under torchrun or mpiexec.")] = 4,
    engine: Annotated[str | None, typer.Option(help="gloo, mpi or zmq.")] = None,
    numels: Annotated[str | None, typer.Option(help="Sizes, e.g. 100,1e4,1e6; default 1e2 to 1e7.")] = None,
    seconds: Annotated[float, typer.Option(help="Time to spend on each size.")] = 4.0,
    quick_probe: Annotated[bool, typer.Option("--quick-probe", help="Let auto know only what a short probe tells.")] = (
        False
    ),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Measure every all-reduce algorithm and the engine's own, and judge what auto picks from a fresh probe."""
    if not seconds > 0:
        raise BadInput(f"--seconds must be above zero, got {seconds}")
    sizes = list(NUMELS) if numels is None else _sizes(numels)
    record = run_job(ranks, engine, measure, (sizes, seconds, quick_probe), timeout_s=3600)
    if record is None:
        return
    if json:
        echo_json(record)
        return
    for line in table(record):
        typer.echo(line)


def table(record: dict[str, Any]) -> list[str]:
    """The record as lines: one a measurement, then what auto picked."""
    lines = [f"{record['engine']}, {record['world_size']} ranks; fit residual {100 * record['fit_relative_rms']:.0f} %"]
    lines.append(f"{'numel':>9} {'algorithm':<13} {'measured':>12} {'predicted':>12} {'model':>12} {'sent':>12} rounds")
    for row in record["results"]:
        model = "" if row["model_seconds"] is None else f"{row['model_seconds'] * 1e3:9.3f} ms"
        sent = "" if row["sent_nbytes"] is None else f"{row['sent_nbytes']:>12}"
        lines.append(
            f"{row['numel']:>9} {row['algorithm']:<13} {row['seconds'] * 1e3:9.3f} ms "
            f"{row['predicted_seconds'] * 1e3:9.3f} ms {model:>12} {sent:>12} {row['rounds'] or '':>4}"
        )
    for pick in record["auto"]:
        native = "" if pick["ratio_to_native"] is None else f", {pick['ratio_to_native']:.2f} × native"
        lines.append(
            f"{pick['numel']:>9} auto: {pick['pick']} ({pick['ratio_to_best']:.2f} × the best, {pick['best']}{native})"
        )
    return lines


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(float(part)) for part in text.split(",")]
    except (ValueError, OverflowError) as error:
        raise BadInput(f"--numels '{text}': expected numbers with commas, such as 100,1e4,1e6") from error
    if any(size < 1 for size in sizes):
        raise BadInput(f"--numels '{text}': every size must be at least 1")
    return sizes
