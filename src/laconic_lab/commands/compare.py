"""`laconic compare`: configurations beside each other, with accuracy, spread and lint; `laconic demo` is one such."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from laconic import words
from laconic.cli.shared import Json, count_option, echo_json
from laconic.consistency import names as mode_names
from laconic.errors import BadInput
from laconic.statistics import Median
from laconic.text_table import aligned
from laconic.workloads import Changes
from laconic_lab.clusters.cluster import Cluster
from laconic_lab.commands import run_options as options
from laconic_lab.lint import counts, failures
from laconic_lab.records.record import Record
from laconic_lab.records.summary import SummaryRow, main_claim, results, summarise
from laconic_lab.report import FILE
from laconic_lab.runs.compare import compare as run
from laconic_lab.runs.compare import resume as go_on
from laconic_lab.runs.progress import say
from laconic_lab.runs.spec import RunSpec, split

CONFIGS = "ddp,compress:dynamic8,distribute:dynamic8,compress:topk(0.01)+qsgd(4)"
DIVIDED = ("none", "dynamic8")  # codecs of --divide
DEMO, DEMO_LINK = "digits-mlp", "100mbit"
DEMO_WORKERS = max(2, min(4, len(os.sched_getaffinity(0))))  # hosts that share a core wait for it, not for the link
NEXT = "next: laconic run --hosts 2 --link 100mbit YOUR_SCRIPT.py, then laconic.compress(ddp, \"auto\") in it"
UNSTEADY = 1.5  # times the quickest seed's step
DEMO_CONFIGS = "ddp,compress:dynamic8,distribute:dynamic8,compress:auto,compress:topk(0.05)+qsgd(4),warm_up=10"
DEMO_EPOCHS = 10  # half the workload's own: enough for the target on most seeds, and done in about two minutes
KINDS = "compress:CODEC, distribute:CODEC@MODE, ddp, ddp-fp16, ddp-powersgd, single; a bare codec means compress:CODEC"


def compare(
    context: typer.Context,
    workload: options.WorkloadName = None,
    workers: options.TrialWorkers = 4,
    configs: Annotated[str | None, typer.Option(help=f"{KINDS}. [default: {CONFIGS}]")] = None,
    consistency: Annotated[
        str | None, typer.Option(help=f"When workers agree: {', '.join(mode_names())}; each with every codec.")
    ] = None,
    divide: Annotated[
        str | None, typer.Option(help="Also compare a division such as 'stages(micro=8)', exact and with dynamic8.")
    ] = None,
    slow: Annotated[float, typer.Option(help="Slow down the last worker by this factor.")] = 1.0,
    seeds: Annotated[int, typer.Option(help="Trials of each configuration; fewer than 3 give no verdict.")] = 3,
    first_seed: Annotated[int, typer.Option(help="The first seed.")] = 0,
    link: options.Link = None,
    between: options.Between = None,
    hosts: options.Hosts = None,
    epochs: options.Epochs = None,
    learning_rate: options.LearningRate = None,
    batch: options.Batch = None,
    batch_schedule: options.BatchSchedule = None,
    target: Annotated[float | None, typer.Option(help="Test accuracy to reach. Default: the workload's.")] = None,
    target_loss: Annotated[
        float | None, typer.Option(help="Test loss to reach; it replaces the target accuracy.")
    ] = None,
    tuning_runs: options.TuningRuns = None,
    resume: options.Resume = None,
    runs: options.Runs = options.RUNS,
    json: Json = False,
) -> None:
    """Train a workload with several configurations and seeds, and compare accuracy, time and bytes."""
    if resume is not None:
        options.refuse_beside_resume(context, "workload")
        record, folder = go_on(resume, workload, say)
    else:
        default = "ddp" if divide else CONFIGS if consistency is None else "none"
        chosen = split(configs or default) + [f"divide:{codec}@{divide}" for codec in DIVIDED if divide]
        spec = RunSpec(
            options.named(workload), workers, chosen, range(first_seed, first_seed + seeds), slow=slow, link=link,
            between=between, hosts=hosts, tuning_runs=tuning_runs, runs=runs, command=options.command(),
            changes=Changes(epochs, learning_rate, batch, target, batch_schedule, target_loss),
        )  # fmt: skip
        record, folder = run(spec, split(consistency or "sync"), say)
    show(record, folder, json=json)
    if not any(trial.failed is None for trial in record.trials):
        raise typer.Exit(1)


def demo(
    workers: options.TrialWorkers = DEMO_WORKERS,
    seeds: Annotated[int, count_option("Trials of each configuration.")] = 3,
    epochs: Annotated[int, count_option("Epochs of each trial.")] = DEMO_EPOCHS,
    runs: options.Runs = options.RUNS,
    json: Json = False,
) -> None:
    """Compare DDP with Laconic on handwritten digits, over emulated 100 Mbit/s links (as root) or loopback."""
    link, sentence = _demo_link(workers)
    say(f"training {DEMO} by {DEMO_CONFIGS}, {seeds} seeds each, on {sentence}")
    typed = ["laconic", "compare", DEMO, "-n", str(workers), "--configs", DEMO_CONFIGS]
    typed += ["--seeds", str(seeds), "--epochs", str(epochs), *(["--link", link] if link else [])]
    spec = RunSpec(DEMO, workers, split(DEMO_CONFIGS), range(seeds), changes=Changes(epochs), link=link, runs=runs,
                   command=shlex.join(typed))  # fmt: skip
    record, folder = run(spec, note=say)
    show(record, folder, json=json)
    if not json:
        typer.echo(gained(record))
        typer.echo(NEXT)
    if any(trial.failed is not None for trial in record.trials):
        raise typer.Exit(1)


def gained(record: Record) -> str:
    """Name the quickest configuration that reached the target on every seed, beside the base, with accuracies."""
    rows = {row.configuration.name: row for row in summarise(record)}
    there = {name: row for name, row in rows.items() if row.to_target is not None and not row.missed and not row.failed}
    base = record.claims[0].baseline if record.claims else None
    if base not in there or len(there) < 2:
        return "gained: nothing that can be said, since not every seed reached the target"
    first, best = there[base], min(there.values(), key=lambda row: row.to_target.value if row.to_target else 0.0)
    if best is first or first.to_target is None or best.to_target is None or first.accuracy is None:
        return f"gained: nothing; {base} was the quickest to {words.goal(record.workload)}"
    sent = f"{_shown(best.sent, words.nbytes)} a step instead of {_shown(first.sent, words.nbytes)}"
    return words.plain(
        f"gained: {best.configuration.name} reached {words.goal(record.workload)} in "
        f"{words.seconds(best.to_target.value)}, {base} in {words.seconds(first.to_target.value)}; it sent {sent}, and "
        f"ended at {_shown(best.accuracy, words.percent)} where {base} ended at {words.percent(first.accuracy.value)}"
    )


def _demo_link(workers: int) -> tuple[str | None, str]:
    """The link to compare on, and a sentence that says which and why."""
    try:
        with Cluster(workers, DEMO_LINK):
            return DEMO_LINK, f"{workers} emulated hosts, joined by links of 100 Mbit/s"
    except BadInput as error:
        why = str(error).partition(";")[0]
        return None, f"{workers} processes on this machine's loopback, which is quicker than any network: {why}"


def show(record: Record, folder: Path, *, json: bool) -> None:
    """The result: as JSON, or as a table, what the lint says, and where the report is."""
    report = str(folder / FILE)
    if json:
        lint = [asdict(finding) for finding in record.lint]
        return echo_json({"results": results(record), "lint": lint, "report": report})
    for line in (*table(record), *unsteady(record)):
        typer.echo(line)
    slow = {each.options["slow_worker"] for each in record.configurations if "slow_worker" in each.options}
    for sentence in sorted(slow):
        typer.echo(f"with a slow worker: {sentence}")
    found = counts(record.lint)
    typer.echo("lint: " + ", ".join(f"{count} {verdict}" for verdict, count in found.items()))
    for finding in failures(record.lint):
        typer.echo(f"  fails {finding.rule}, {finding.title}: {finding.evidence}")
    typer.echo(f"report: {report}")


def table(record: Record) -> list[str]:
    """One line a configuration, accuracy beside every speed-up; figures are medians over the seeds."""
    base = record.claims[0].baseline if record.claims else None
    quality = "test loss" if record.workload.judged_by_loss else "accuracy"
    head = ["configuration", quality, f"time to {words.goal(record.workload)}", "step", "sent/step",
            "speed-up" if base is None else f"speed-up over {base}", "verdict"]  # fmt: skip
    summary = summarise(record)
    rows = [head, *(_cells(record, row, base) for row in summary)]
    if any(row.staleness is not None and row.staleness.value > 0 for row in summary):
        told = [_shown(row.staleness, "{:.1f}".format) for row in summary]
        rows = [[*row[:5], cell, *row[5:]] for row, cell in zip(rows, ["staleness", *told], strict=True)]
    if record.workload.judged_by_loss:
        then = [(_shown(row.sent_to_target, words.nbytes), _shown(row.times_infinite, words.times)) for row in summary]
        then = [("sent until then", "of an infinite network"), *then]
        rows = [[*row[:3], *cells, *row[3:]] for row, cells in zip(rows, then, strict=True)]
    return aligned([[words.plain(cell) for cell in row] for row in rows], left=(0, len(rows[0]) - 1))


def unsteady(record: Record) -> list[str]:
    """A sentence where one configuration's steps took much longer with one seed than with another."""
    for row in summarise(record):
        if row.step is not None and row.step.high > UNSTEADY * row.step.low:
            span = words.plain(f"{words.seconds(row.step.low)} to {words.seconds(row.step.high)}")
            name = row.configuration.name
            return [f"steps of {name} took {span} by seed: speed-ups are unsure; is the machine busy?"]
    return []


def _cells(record: Record, row: SummaryRow, base: str | None) -> list[str]:
    quality = _shown(row.accuracy, words.percent)
    if record.workload.judged_by_loss:
        quality = _shown(row.loss, words.digits)
    to_target = _shown(row.to_target, words.seconds)
    if row.to_target is None and row.trials:
        to_target = f"reached by {row.reached} of {len(row.trials)}"
    claim = main_claim(row)
    speed_up, verdict = "the base" if row.configuration.name == base else words.NOTHING, ""
    if claim is not None:
        speed_up = words.times(claim.ratio)
        if claim.accuracy is not None and claim.baseline_accuracy is not None:
            speed_up += f" at {words.percent(claim.accuracy)} against {words.percent(claim.baseline_accuracy)}"
        told = sorted(row.claims.values(), key=lambda each: each is not claim)
        verdict = "; ".join(f"{each.what}: {each.verdict}" for each in told)
        if row.missed:
            verdict = f"target missed by {row.missed} of {len(row.trials)} seeds"
    if row.failed:
        verdict = "; ".join(part for part in (verdict, f"{row.failed} failed") if part)
    step, sent = _shown(row.step, words.seconds), _shown(row.sent, words.nbytes)
    return [row.configuration.name, quality, to_target, step, sent, speed_up, verdict]


def _shown(found: Median | None, unit: Callable[[float], str]) -> str:
    return words.NOTHING if found is None else unit(found.value)
