"""`laconic train`: train a workload on several workers, resumably."""

from __future__ import annotations

import json as json_module
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

from laconic.errors import BadInput
from laconic.lab.elastic.run import train_elastic
from laconic.lab.records.summary import results
from laconic.lab.report import words
from laconic.lab.runs.progress import say
from laconic.lab.runs.train import resume as go_on
from laconic.lab.runs.train import show_warnings_as_sentences
from laconic.lab.runs.train import train as start
from laconic.workloads import Changes, names


def train(
    workload: Annotated[str | None, typer.Argument(help=f"One of {', '.join(names())}.")] = None,
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers; ignored under torchrun or mpiexec.")] = 4,
    codec: Annotated[str, typer.Option(help="What is sent: a codec spec, none or auto.")] = "none",
    algorithm: Annotated[str, typer.Option(help="To whom: auto, gather or an all-reduce algorithm.")] = "auto",
    consistency: Annotated[str, typer.Option(help="When workers agree, such as local(8).")] = "sync",
    elastic: Annotated[bool, typer.Option("--elastic", help="Train on when workers die, and replace them.")] = False,
    link: Annotated[str | None, typer.Option(help="Emulate links of this speed: 1gbit, 100mbit (root).")] = None,
    hosts: Annotated[int | None, typer.Option(help="Emulated hosts; default: one a worker.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, data order and dropout.")] = 0,
    epochs: Annotated[int | None, typer.Option(help="Default: the workload's.")] = None,
    learning_rate: Annotated[float | None, typer.Option(help="At the start. Default: the workload's.")] = None,
    batch: Annotated[int | None, typer.Option(help="Samples a step, of all workers. Default: the workload's.")] = None,
    tuning_runs: Annotated[int | None, typer.Option(help="How many runs it took to choose these settings.")] = None,
    resume: Annotated[Path | None, typer.Option(help="Go on with this run, runs/<id>; other options are its own.")] = (
        None
    ),
    runs: Annotated[Path, typer.Option(help="Where runs are kept.")] = Path("runs"),
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """Train a workload on N local workers (or under torchrun, mpiexec); Ctrl-C leaves a checkpoint to resume from."""
    show_warnings_as_sentences()
    if resume is not None:
        done = go_on(resume, workload)
    elif workload is None:
        raise BadInput(f"name a workload ({', '.join(names())}), or --resume a run")
    else:
        done = (train_elastic if elastic else start)(
            workload, workers, codec=codec, algorithm=algorithm, consistency=consistency, link=link, hosts=hosts,
            seed=seed, changes=Changes(epochs, learning_rate, batch), tuning_runs=tuning_runs, runs=runs,
            command=shlex.join(["laconic", *sys.argv[1:]]),
        )  # fmt: skip
    if done is None:
        return
    if not done.record.finished:
        lost = done.record.interruptions[-1].lost
        back = f", {lost} of them after the last checkpoint" if lost else ""
        say(f"stopped after step {done.step} of {done.steps}{back}; go on with: laconic train --resume {done.folder}")
        raise typer.Exit(130)
    trial, report = done.record.trials[0], done.folder / "report.html"
    if json:
        body = {"results": results(done.record), "weights_sha256": trial.weights_sha256, "report": str(report)}
        typer.echo(json_module.dumps(body, indent=2, ensure_ascii=False))
        return
    quality = f"test loss {trial.test_loss:.4g}" if trial.test_accuracy is None else words.percent(trial.test_accuracy)
    reached = "target not reached" if trial.seconds_to_target is None else (
        f"target reached after {trial.seconds_to_target:.1f} s")  # fmt: skip
    line = (
        f"{done.record.workload.name}: {quality} after {trial.steps} steps and {trial.seconds_total:.1f} s, {reached}; "
        f"{words.nbytes(trial.sent_nbytes_per_step)} sent a step by each worker"
    )
    typer.echo(line.replace("\N{NARROW NO-BREAK SPACE}", " "))
    typer.echo(f"weights sha256 {trial.weights_sha256}")
    typer.echo(f"report: {report}")
