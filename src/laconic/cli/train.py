"""`laconic train`: train a workload on several workers, resumably."""

from __future__ import annotations

from typing import Annotated

import typer

from laconic.cli.run_options import (
    RUNS,
    Batch,
    Epochs,
    Hosts,
    Json,
    LearningRate,
    Link,
    Resume,
    Runs,
    TuningRuns,
    WorkloadName,
    command,
    named,
    show_warnings_as_sentences,
)
from laconic.cli.tables import echo_json
from laconic.lab.records.summary import results
from laconic.lab.report import words
from laconic.lab.runs.configurations import with_mode
from laconic.lab.runs.progress import say
from laconic.lab.runs.spec import RunSpec
from laconic.lab.runs.train import resume as go_on
from laconic.lab.runs.train import train as start
from laconic.workloads import Changes


def train(
    workload: WorkloadName = None,
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers; ignored under torchrun or mpiexec.")] = 4,
    codec: Annotated[str, typer.Option(help="What is sent: a codec, none or auto; or compress:CODEC, …")] = "none",
    algorithm: Annotated[str, typer.Option(help="To whom: auto, gather or an all-reduce algorithm.")] = "auto",
    consistency: Annotated[str, typer.Option(help="When workers agree, such as local(8).")] = "sync",
    elastic: Annotated[bool, typer.Option("--elastic", help="Train on when workers die, and replace them.")] = False,
    link: Link = None,
    hosts: Hosts = None,
    seed: Annotated[int, typer.Option(help="Of weights, data order and dropout.")] = 0,
    epochs: Epochs = None,
    learning_rate: LearningRate = None,
    batch: Batch = None,
    tuning_runs: TuningRuns = None,
    resume: Resume = None,
    runs: Runs = RUNS,
    json: Json = False,
) -> None:
    """Train a workload on N local workers (or under torchrun, mpiexec); Ctrl-C leaves a checkpoint to resume from."""
    show_warnings_as_sentences()
    if resume is not None:
        done = go_on(resume, workload)
    else:
        name = with_mode(codec, consistency, "elastic" if elastic else None)
        done = start(RunSpec(
            named(workload), workers, [name], [seed], algorithm=algorithm, link=link, hosts=hosts,
            changes=Changes(epochs, learning_rate, batch), tuning_runs=tuning_runs, runs=runs, command=command(),
        ))  # fmt: skip
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
        echo_json(body)
        return
    quality = f"test loss {trial.test_loss:.4g}" if trial.test_accuracy is None else words.percent(trial.test_accuracy)
    reached = "target not reached" if trial.seconds_to_target is None else (
        f"target reached after {trial.seconds_to_target:.1f} s")  # fmt: skip
    line = (
        f"{done.record.workload.name}: {quality} after {trial.steps} steps and {trial.seconds_total:.1f} s, {reached}; "
        f"{words.nbytes(trial.sent_nbytes_per_step)} sent a step by each worker"
    )
    typer.echo(words.plain(line))
    typer.echo(f"weights sha256 {trial.weights_sha256}")
    typer.echo(f"report: {report}")
