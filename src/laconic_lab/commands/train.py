"""`laconic train`: train a workload on several workers, resumably."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from laconic import words
from laconic.cli.shared import Json, echo_json
from laconic.errors import BadInput
from laconic.workloads import Changes
from laconic_lab.commands import run_options as options
from laconic_lab.records.summary import results
from laconic_lab.runs.progress import say
from laconic_lab.runs.spec import RunSpec, with_mode
from laconic_lab.runs.train import Finished
from laconic_lab.runs.train import resume as go_on
from laconic_lab.runs.train import train as start


def train(
    context: typer.Context,
    workload: options.WorkloadName = None,
    workers: Annotated[int, typer.Option("-n", "--workers", help="Workers; ignored under torchrun or mpiexec.")] = 4,
    codec: Annotated[str, typer.Option(help="A codec, none or auto; or compress:CODEC, …")] = "none",
    algorithm: Annotated[str, typer.Option(help="auto, gather or an all-reduce algorithm.")] = "auto",
    consistency: Annotated[str, typer.Option(help="When workers agree, such as local(8).")] = "sync",
    elastic: Annotated[bool, typer.Option("--elastic", help="Continue when workers die, and replace them.")] = False,
    divide: Annotated[str | None, typer.Option(help="Divide the model: 'fc=dense(output)', 'stages(micro=8)'.")] = None,
    plan: Annotated[Path | None, typer.Option(help="Train with this plan; see laconic plan -o plan.json.")] = None,
    link: options.Link = None,
    between: options.Between = None,
    hosts: options.Hosts = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, data order and dropout.")] = 0,
    epochs: options.Epochs = None,
    learning_rate: options.LearningRate = None,
    batch: options.Batch = None,
    batch_schedule: options.BatchSchedule = None,
    tuning_runs: options.TuningRuns = None,
    resume: options.Resume = None,
    runs: options.Runs = options.RUNS,
    json: Json = False,
) -> None:
    """Train a workload on N local workers, or under torchrun or mpiexec; Ctrl-C saves a checkpoint."""
    if resume is not None:
        options.refuse_beside_resume(context, "workload")
        done = go_on(resume, workload)
    else:
        if plan is not None:
            if (codec, consistency, elastic, divide) != ("none", "sync", False, None):
                raise BadInput("--plan says how to train: it takes no --codec, --consistency, --elastic or --divide")
            if batch is not None or algorithm != "auto":
                raise BadInput("--plan says what a step has and how it is sent: it takes no --batch or --algorithm")
            given = options.read_plan(plan, workload)
            workload, workers, codec, batch = given.model, given.strategy.ranks, given.configuration, given.batch
        if divide is not None and (elastic or consistency != "sync"):
            raise BadInput("--divide shares one model among all workers: it takes neither --elastic nor --consistency")
        name = with_mode(codec, consistency, "elastic" if elastic else None)
        name = name if divide is None else f"divide:{codec}@{divide}"
        done = start(RunSpec(
            options.named(workload), workers, [name], [seed], algorithm, link, hosts, between,
            Changes(epochs, learning_rate, batch, batch_schedule=batch_schedule),
            tuning_runs=tuning_runs, runs=runs, command=options.command(),
        ))  # fmt: skip
    if done is not None:
        _show(done, json)


def _show(done: Finished, json: bool) -> None:
    """Say how a training ended: stopped on the way, or with a model."""
    if not done.record.finished:
        lost = done.record.interruptions[-1].lost
        back = f", {lost} of them after the last checkpoint" if lost else ""
        say(f"stopped after step {done.step} of {done.steps}{back}; go on with: laconic train --resume {done.folder}")
        raise typer.Exit(130)
    trial, report = done.record.trials[0], done.folder / "report.html"
    if json:
        digest = trial.weights_sha256
        return echo_json({"results": results(done.record), "weights_sha256": digest, "report": str(report)})
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
