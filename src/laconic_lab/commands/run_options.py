"""Options and setup shared by `train`, `compare` and `demo`."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from laconic.cli.shared import count_option
from laconic.errors import BadInput
from laconic.planner.plan import Plan
from laconic.workloads import names
from laconic_lab.commands.names import NO_WORKLOAD

RUNS = Path("runs")
WorkloadName = Annotated[str | None, typer.Argument(help=f"One of {', '.join(names())}; or your own, module:factory.")]
Link = Annotated[
    str | None, typer.Option(help="Emulate links: RATE[,LATENCY[,JITTER[,LOSS]]], such as 100mbit,40ms (root).")
]
Between = Annotated[str | None, typer.Option(help="Link between two sites of half the hosts each, as in --link.")]
Hosts = Annotated[int | None, typer.Option(help="Emulated hosts; default: one per worker.")]
Epochs = Annotated[int | None, count_option("Default: the workload's.")]
LearningRate = Annotated[float | None, typer.Option(help="Initial learning rate. Default: the workload's.")]
Batch = Annotated[int | None, typer.Option(help="Samples per step over all workers. Default: the workload's.")]
BatchSchedule = Annotated[
    str | None, typer.Option(help="grow: grow the batch instead of lowering the rate; grow(2048): up to 2048 samples.")
]
TuningRuns = Annotated[int | None, count_option("Number of runs used to choose these settings.", least=0)]
Resume = Annotated[Path | None, typer.Option(help="Resume this run, runs/<id>, with its own options.")]
Runs = Annotated[Path, typer.Option(help="Where runs are kept.")]
TrialWorkers = Annotated[int, count_option("Workers of each trial.", "-n", "--workers")]


def refuse_beside_resume(context: typer.Context, *heeded: str) -> None:
    """Refuse every option that was typed beside --resume, but for those that are `heeded`, by their parameters' names.

    A run goes on as it was begun: its record describes one training, and its learning rate follows from its epochs.
    """
    typed = []
    for each in context.command.params:
        source = context.get_parameter_source(each.name or "")
        if each.name not in ("resume", "json", *heeded) and source is not None and source.name == "COMMANDLINE":
            typed.append(max(each.opts, key=len))
    if typed:
        raise BadInput(f"--resume goes on with what was begun, as it was begun: it takes no {', '.join(typed)}")


def named(workload: str | None) -> str:
    """The workload, which only a resumption can do without."""
    if workload is None:
        raise BadInput(NO_WORKLOAD.format(", ".join(names())))
    return workload


def read_plan(path: Path, workload: str | None) -> Plan:
    """The plan in a file, which is for this workload if one is named."""
    try:
        found = Plan.from_json(path.read_bytes())
    except OSError as error:
        raise BadInput(f"the plan '{path}' cannot be read: {error.strerror}") from error
    if workload not in (None, found.model):
        raise BadInput(f"'{path}' is a plan for '{found.model}', not for '{workload}'")
    return found


def command() -> str:
    """The command as the user typed it."""
    return shlex.join(["laconic", *sys.argv[1:]])
