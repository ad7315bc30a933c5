"""What a step of a divided model costs beside torch's own divisions, and the bound."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from benchmarks.divide import memory_limit, pipeline
from benchmarks.divide.layers import SETS, DivideSpec, measure
from laconic import words
from laconic.cli.shared import Json, count_option, echo_json, echo_table
from laconic.errors import BadInput, UnknownName

HEADINGS = ("config", "step", "bound", "× bound", "sent", "predicted", "error")
PIPELINE, MEMORY = "pipeline", "memory"
ALL = (*SETS, PIPELINE, MEMORY)
# What a set has of its own, and no option changes.
FIXED = {
    "trick": ("width", "inner"),
    PIPELINE: ("hosts", "batch", "width", "inner", "pin"),
    MEMORY: ("hosts", "link", "batch", "width", "inner", "blocks", "steps", "pin"),
}
Set = Annotated[str, typer.Option("--set", help=f"What is divided: {', '.join(ALL)}.")]


def main(
    context: typer.Context,
    name: Set = "dense",
    hosts: Annotated[int, typer.Option(help="One process each.")] = 2,
    link: Annotated[str | None, typer.Option(help="Emulate links: 1gbit, 100mbit (root); else loopback.")] = None,
    batch: Annotated[int, typer.Option(help="Rows of dense layers; images of each host in the trick.")] = 128,
    width: Annotated[int, typer.Option(help="Of what two dense layers take and give.")] = 512,
    inner: Annotated[int, typer.Option(help="Of what lies between them.")] = 2048,
    blocks: Annotated[int, count_option("Turns of each configuration; fewer than 5 decide nothing.")] = 5,
    steps: Annotated[int, count_option("In a block.")] = 3,
    pin: Annotated[bool, typer.Option(help="Give each host one core of this machine, in turn.")] = True,
    json: Json = False,
) -> None:
    """Time steps of divided models in turn with torch's tensor parallel, pipelines or DistributedDataParallel."""
    if name not in ALL:
        raise UnknownName("set of divisions", name, ALL)
    for option in FIXED.get(name, ()):
        if (source := context.get_parameter_source(option)) is not None and source.name == "COMMANDLINE":
            raise BadInput(f"--set {name} takes no --{option}: it has its own")
    if name == PIPELINE:
        record = pipeline.measure(pipeline.PipelineSpec(link, blocks=blocks, steps=steps))
    elif name == MEMORY:
        record = memory_limit.measure(memory_limit.MemorySpec())
    else:
        record = measure(DivideSpec(name, hosts, link, batch, width, inner, blocks, steps, pin))
    if json:
        return echo_json(record)
    if name == MEMORY:
        cells = [_memory_cells(row) for row in record["results"]]
        return echo_table(("config", "weights", "limit", "peak", "outcome"), cells)
    rows = []
    for row in record["results"]:
        sent = "" if row["sent_nbytes"] is None else words.nbytes(row["sent_nbytes"])
        step, bound = row["step_seconds"], row["bound_seconds"]
        told = [words.seconds(step), words.seconds(bound), f"{step / bound:.2f}", sent]
        rows.append([row["config"], *told, words.nbytes(row["predicted_nbytes"]), f"{row['max_error']:.2g}"])
    echo_table(HEADINGS, [[words.plain(cell) for cell in row] for row in rows])


def _memory_cells(row: dict[str, Any]) -> list[str]:
    outcome = row["failed"] or f"loss {row['losses'][0]:.3g} to {row['losses'][-1]:.3g}"
    return [row["config"], f"{row['weights']:,}", f"{row['limit_mb']} MB", f"{row['peak_mb']:.0f} MB", outcome]
