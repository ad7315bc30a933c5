"""Convolutions by every method beside torch; their errors; the lecture's ladder."""

from __future__ import annotations

import json as json_module
from dataclasses import asdict
from typing import Annotated, Any

import typer

from benchmarks.operators import layer_sets
from benchmarks.operators.ladder import Rung, ladder
from benchmarks.operators.layer_timing import Result, geometric_means, measure, record, validate
from laconic.cli.shared import amount_option, count_option
from laconic.operators.search import Limits


def main(
    set_: Annotated[str, typer.Option("--set", help=f"Layers: {', '.join(layer_sets.names())} or all.")] = "vgg16",
    layer: Annotated[str, typer.Option(help="Only layers with this in their names.")] = "",
    batch: Annotated[list[int] | None, count_option("Samples; may be repeated. Default: 1.")] = None,
    threads: Annotated[int, count_option("Of torch.")] = 1,
    method: Annotated[list[str] | None, typer.Option(help="Only these methods, beside torch's own.")] = None,
    tolerance: Annotated[float, amount_option("Largest relative error.")] = 1e-5,
    workspace_mib: Annotated[int, count_option("Most memory of a method, in MiB.", least=0)] = 64,
    policy: Annotated[str, typer.Option(help="Of micro-batching: undivided, powers or all.")] = "powers",
    train: Annotated[bool, typer.Option("--train", help="Gradients too; weights change every step.")] = False,
    turns: Annotated[int, count_option("Of each timing.")] = 21,
    budget: Annotated[float, amount_option("Seconds of each timing, at most.")] = 20.0,
    ladder_: Annotated[bool, typer.Option("--ladder", help="One layer, from three loops to Winograd.")] = False,
    validate_: Annotated[bool, typer.Option("--validate", help="Errors of all methods, no times.")] = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Time convolutions by the quickest admitted method beside torch's own, in turns."""
    import torch

    torch.set_num_threads(threads)
    sets = layer_sets.names() if set_ == "all" else [set_]
    if ladder_:
        _ladder(ladder(turns), json)
    elif validate_:
        _validate([row for name in sets for row in validate(name)], json)
    else:
        limits = Limits(tolerance, workspace_mib << 20, policy, train, tuple(method or ()))
        found = []
        for name in sets:
            for samples in batch or [1]:
                for each in measure(name, samples, limits, turns, budget, layer):
                    found.append(each)
                    typer.echo(_line(each), err=json)
        if json:
            typer.echo(json_module.dumps(record(found), indent=1))
        else:
            for key, means in geometric_means(found).items():
                typer.echo(f"{key}: " + ", ".join(f"{name} {value:.2f}" for name, value in means.items()))


def _line(each: Result) -> str:
    divided = "" if each.micro_batch == each.batch else f" in {each.micro_batch}s"
    back = "" if each.backward_speedup is None else f", backward {each.backward_speedup:.2f}"
    times = f"{each.native_ms:9.3f} → {each.forward_ms:9.3f} ms  {each.speedup:5.2f}"
    gain = "" if each.micro_batching == 1 else f", micro-batches {each.micro_batching:.2f}"
    name = f"{each.set:<10} {each.layer:<16} N={each.batch:<3}"
    return f"{name} {times}{back}{gain}  {each.max_error:.1e}  {each.method}{divided}"


def _ladder(rungs: list[Rung], json: bool) -> None:
    if json:
        typer.echo(json_module.dumps({"ladder": [asdict(rung) for rung in rungs]}, indent=1))
        return
    typer.echo(f"{'way':<16}{'ms':>9}{'GF/s':>8}{'× torch':>9}{'flop/B':>8}{'products':>12}{'error':>9}")
    for r in rungs:
        times = f"{1e3 * r.seconds:9.2f}{r.gflops:8.1f}{r.speedup:9.2f}{r.intensity:8.2f}"
        typer.echo(f"{r.name:<16}{times}{r.multiplications:>12,}{r.max_error:9.0e} {'█' * round(r.gflops / 4)}")


def _validate(rows: list[dict[str, Any]], json: bool) -> None:
    """A heat map: a line a layer, a column a method, the exponent of the error in each cell."""
    if json:
        typer.echo(json_module.dumps({"validation": rows}, indent=1))
    else:
        methods = list(dict.fromkeys(row["method"] for row in rows))
        typer.echo(f"{'layer':<28}" + "".join(f"{name:>16}" for name in methods))
        for name in dict.fromkeys(f"{row['set']} {row['layer']}" for row in rows):
            cells = {row["method"]: row for row in rows if f"{row['set']} {row['layer']}" == name}
            shown = [
                f"{cells[m]['max_error']:.1e}" + ("" if cells[m]["passed"] else "!") if m in cells else "·"
                for m in methods
            ]
            typer.echo(f"{name:<28}" + "".join(f"{cell:>16}" for cell in shown))
    if not all(row["passed"] for row in rows):
        raise typer.Exit(1)
