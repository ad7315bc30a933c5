"""`laconic bench step`: time a training step in several configurations, beside its lower bounds."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from laconic import words
from laconic.cli.shared import Json, count_option, echo_json, echo_table
from laconic_lab.bench.step import StepSpec, measure
from laconic_lab.commands import run_options as options
from laconic_lab.runs.spec import split
from laconic_lab.runs.strategies import PEERS

CONFIGS = "compress:dynamic8,distribute:dynamic8,compress:auto"
HEADINGS = (
    "config", "step", "× bound", "× DDP's", "alone", "kernels", "wire", "processor", "sent", "peak memory", "loss", "",
)  # fmt: skip


def step(
    workload: Annotated[str, typer.Option(help="A workload's name, or your own, module:factory.")] = "shakespeare-gpt",
    configs: Annotated[str, typer.Option(help="Such as compress:dynamic8; options after commas.")] = CONFIGS,
    peers: Annotated[bool, typer.Option(help=f"Also measure {', '.join(PEERS)}.")] = True,
    hosts: Annotated[int, typer.Option(help="Emulated hosts, one process each.")] = 2,
    link: options.Link = None,
    between: options.Between = None,
    batch: Annotated[int | None, typer.Option(help="Samples per step of each host. Default: the workload's.")] = None,
    blocks: Annotated[int, typer.Option(help="Turns of each configuration; fewer than 5 give no verdict.")] = 5,
    steps: Annotated[int, typer.Option(help="Timed steps per block.")] = 5,
    warm_up: Annotated[int | None, typer.Option(help="Steps before the first block; 3, or 20 with auto.")] = None,
    seed: Annotated[int, count_option("Seed of weights and data order.", least=0)] = 0,
    pin: Annotated[bool, typer.Option(help="Give each host one core of this machine, in turn.")] = True,
    json: Json = False,
) -> None:
    """Time training steps of several configurations in turns, and compare with the bounds of computing and link."""
    named = split(",".join([*(name for name in PEERS if peers and name not in split(configs)), configs]))
    record = measure(StepSpec(workload, named, hosts, link, between, batch, blocks, steps, warm_up, seed, pin))
    if json:
        return echo_json(record)
    rows = [_cells(row) for row in [record["alone"], *record["results"]]]
    echo_table(HEADINGS, [[words.plain(cell) for cell in row] for row in rows])
    told = record["configuration"]
    crowded = ", more hosts than cores" if record["oversubscribed"] else ""
    typer.echo(
        f"{workload}, {told['batch']} samples a step on each of {hosts} hosts{crowded}, link {told['link']}; "
        f"medians of {blocks} blocks of {steps} steps; bound = max(alone + kernels, wire); "
        "DDP's: if the optimiser waits for all gradients"
    )


def _cells(row: dict[str, Any]) -> list[str]:
    names = ("compute_seconds", "kernel_seconds", "wire_seconds", "processor_seconds")
    times = [words.seconds(row[name]) for name in names]
    differ = "replicas differ" if row["replicas_identical"] is False else ""
    ratios = ["" if row[name] is None else f"{row[name]:.2f}" for name in ("ratio_to_bound", "ratio_to_ddp_bound")]
    return [
        row["config"], words.seconds(row["step_seconds"]), *ratios, *times,
        words.nbytes(row["sent_nbytes"]), words.nbytes(row["peak_rss_nbytes"]), f"{row['loss']:.4g}", differ,
    ]  # fmt: skip
