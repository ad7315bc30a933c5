"""`laconic cost`: what a model costs, layer by layer and in all."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic import words
from laconic.cli.shared import FOLLOWING, Json, amount_option, echo_json, echo_table, progress_bar
from laconic.planner.cost import Cost, LayerCost
from laconic.planner.cost import cost as count
from laconic.planner.subject import parse_shape

HEADINGS = (
    "layer", "kind", "calls", "parameters", "weights", "output", "saved", "multiply-adds", "W", "D", "W/D", "im2col",
)  # fmt: skip
Model = Annotated[str, typer.Argument(help="A network or workload by name, or your own, module:factory.")]
Batch = Annotated[int | None, typer.Option(help="Samples per step. Default: the workload's, or 1.")]
Shape = Annotated[str | None, typer.Option(help="Shape of one input, such as 3,224,224.")]
Type = Annotated[str | None, typer.Option(help="float32, float64, or int64 for token ids.")]
Rule = Annotated[str | None, typer.Option(help="sgd, momentum, rmsprop or adam. Default: the workload's, or momentum.")]


def cost(
    model: Model,
    batch: Batch = None,
    input_shape: Shape = None,
    input_type: Type = None,
    optimizer: Rule = None,
    evaluate: Annotated[bool, typer.Option("--eval", help="Count evaluation mode, without gradients.")] = False,
    methods: Annotated[bool, typer.Option("--methods", help="Print work and depth of convolution methods.")] = False,
    rate: Annotated[float, amount_option("Samples per second, to compute memory power.")] = 20.0,
    json: Json = False,
) -> None:
    """Count parameters, operations, depth, memory and energy of a model, without running it."""
    shape = None if input_shape is None else parse_shape(input_shape)
    with progress_bar(FOLLOWING, quiet=json):
        found = count(model, batch, shape, input_type, optimizer, train=not evaluate)
    if json:
        return echo_json(found.to_dict())
    rows = [_cells(layer) for layer in found.layers]
    echo_table(HEADINGS, rows, left=("kind",))
    for line in _totals(found, rate, train=not evaluate):
        typer.echo(words.plain(line))
    for note in found.notes:
        typer.echo(note)
    if methods:
        _methods(found)


def _cells(layer: LayerCost) -> list[str]:
    cells = [
        layer.name, layer.kind, str(layer.calls), f"{layer.parameters:,}", words.nbytes(layer.weight_nbytes),
        words.nbytes(layer.output_nbytes), words.nbytes(layer.saved_nbytes), f"{layer.multiply_adds:,}",
        f"{layer.work:,}", str(layer.depth), words.digits(layer.parallelism),
        "" if layer.amplification is None else f"{layer.amplification:.1f} ×",
    ]  # fmt: skip
    return [words.plain(cell) for cell in cells]


def _totals(found: Cost, rate: float, train: bool) -> list[str]:
    total = found.to_dict()["total"]
    shape = "×".join(map(str, found.sample))
    lines = [
        f"{found.name}, {found.batch} × {shape}: {total['parameters']:,} parameters, "
        f"{words.nbytes(total['weight_nbytes'])} of weights",
        f"  forward   {total['multiply_adds']:,} multiply-adds; work W {total['work']:,}, depth D {found.depth:,}, "
        f"average parallelism W/D {words.digits(total['parallelism'])}",
    ]
    if found.uncounted:
        lines.append(f"  not counted: the multiply-adds of {', '.join(found.uncounted)}")
    if train:
        lines.append(f"  backward  {total['backward_multiply_adds']:,} multiply-adds")
        lines.append(
            f"  memory    {words.nbytes(found.training_nbytes)} at the peak of a training step: weights "
            f"{words.nbytes(total['weight_nbytes'])}, gradients {words.nbytes(total['gradient_nbytes'])}, optimiser "
            f"{words.nbytes(found.optimizer_nbytes)}, saved for backward {words.nbytes(found.saved_nbytes)}, and what "
            "lives for a moment"
        )
    joules = total["joules_per_sample"]
    lines.append(
        f"  energy    {words.joules(joules)} of memory a sample at 640 pJ per 32-bit access, {rate * joules:.3g} W at "
        f"{rate:g} samples a second; weights alone {rate * total['weight_joules_per_sample']:.3g} W"
    )
    return lines


def _methods(found: Cost) -> None:
    typer.echo("")
    rows = []
    for layer in found.layers:
        for name, (work, depth) in layer.methods.items():
            rows.append([layer.name, name, f"{work:.4g}", str(depth), f"{work / depth:.4g}"])
    echo_table(("layer", "method", "W", "D", "W/D"), rows, left=("method",))
