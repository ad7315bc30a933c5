"""`laconic train`: one training, started or resumed, from the command's words to its record and report.

Callers: the command line. The run's folder has everything a resumption needs; it is written from the first moment on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from laconic.errors import BadInput
from laconic.exchange.collectives import broadcast
from laconic.lab.environment import run_environment
from laconic.lab.runs import control
from laconic.lab.records import interruptions
from laconic.lab.records import metrics
from laconic.lab.runs.configurations import PEERS, SINGLE, configuration
from laconic.lab.clusters.launch import launched_rank
from laconic.lab.lint import lint
from laconic.lab.runs.progress import Progress
from laconic.lab.records.record import FILE, Configuration, Record, make_id
from laconic.lab.report import write_report
from laconic.lab.runs.trainer import CLOCK, TIMEOUT_S, Plan
from laconic.lab.runs.workers import Workers, ruler
from laconic.storage.checkpoints import newest
from laconic.transports.launcher import RankFailed
from laconic.transports.world import World, init
from laconic.workloads import AS_DECLARED, Changes, Workload, get
from laconic.workloads.description import Description


@dataclass(frozen=True)
class Finished:
    """How `train` ended: its folder, its record, and after how many steps of how many."""

    folder: Path
    record: Record
    step: int
    steps: int


def train(
    workload: str,
    workers: int,
    *,
    codec: str = "none",
    algorithm: str = "auto",
    consistency: str = "sync",
    link: str | None = None,
    hosts: int | None = None,
    seed: int = 0,
    changes: Changes = AS_DECLARED,
    tuning_runs: int | None = None,
    runs: Path = Path("runs"),
    command: str = "",
) -> Finished | None:
    """Train a workload; None on the ranks of a launched job other than 0.

    Raises:
        BadInput: a name that is not known, or a value that cannot be used.
        RankFailed: a worker raised or died; the sentence says how to go on.
    """
    refuse_seed(seed)
    if codec in (*PEERS, SINGLE):
        raise BadInput(f"'{codec}' is for `laconic compare`; train takes a codec, or none")
    chosen_workload = changes.of(workload)
    with Workers(workers, link, hosts) as place:
        with init(timeout_s=TIMEOUT_S) if place.launched else contextlib.nullcontext() as world:
            workers = workers if world is None else world.world_size
            engine = "gloo" if world is None else world.engine
            chosen = configuration(codec, workers, algorithm, consistency, engine)
            told = ruler(place.counted_by(workers), chosen.kind)
            chosen = replace(chosen, options={"seed": seed, "bytes": told})
            record, folder = None, None
            if launched_rank() in (None, 0):
                record = new_record("train", chosen_workload, workers, [chosen], place, tuning_runs, runs, command)
                folder = begin(record, runs)
            if world is not None:
                folder = _shared_folder(folder, world)
        assert folder is not None
        return _train(folder, record, place, chosen)


def resume(folder: Path, workload: str | None = None) -> Finished | None:
    """Go on with a run that was interrupted, from its newest whole checkpoint.

    Raises:
        RecordError: there is no such run.
        BadInput: it is finished, no training, or of another workload.
    """
    folder = run_folder(folder)
    record = unfinished(folder, "train", workload)
    from laconic.lab.elastic.run import is_elastic, resume_elastic

    if is_elastic(record):
        return resume_elastic(folder, record)
    (chosen,) = record.configurations
    link = record.link
    with Workers(chosen.workers, link.spec, link.hosts if link.emulated else None) as place:
        first = launched_rank() in (None, 0)
        return _train(folder, record if first else None, place, chosen, stored=record)


def unfinished(folder: Path, kind: str, workload: str | None) -> Record:
    """The record of a run that `laconic KIND` can go on with.

    Raises:
        RecordError: there is no such run.
        BadInput: it is finished, of the other kind, or of another workload.
    """
    record = Record.load(folder)
    if record.kind != kind:
        what = "training" if record.kind == "train" else "comparison"
        raise BadInput(f"{folder} is a {what}; go on with: laconic {record.kind} --resume {folder}")
    if record.finished:
        raise BadInput(f"{folder} is finished; start another run, or look at {folder / 'report.html'}")
    if workload is not None and workload != record.workload.name:
        raise BadInput(f"{folder} trains {record.workload.name}, not {workload}")
    return record


def run_folder(given: Path) -> Path:
    """The folder of a run: `latest` leads to another as soon as the next one begins."""
    folder = given.parent if given.name == FILE else given
    return folder.parent / folder.readlink() if folder.is_symlink() else folder


def _train(
    folder: Path, record: Record | None, place: Workers, chosen: Configuration, stored: Record | None = None
) -> Finished | None:
    """Train from the newest checkpoint, if any; rank 0 of a launched job, or the command, keeps the record."""
    with control.only_one(folder) if record is not None else contextlib.nullcontext():
        return _train_alone(folder, record, place, chosen, stored)


def _train_alone(
    folder: Path, record: Record | None, place: Workers, chosen: Configuration, stored: Record | None
) -> Finished | None:
    source = record or stored or Record.load(folder)
    step = newest(folder / "checkpoints", chosen.workers)
    if record is not None:
        control.forget(folder)
        if stored is not None:
            interruptions.note_resumption(record, folder, step or 0)
            record.save(folder)
    plan = Plan(source.workload.name, chosen, int(chosen.options["seed"]), Changes.recorded(source.workload),
                folder=str(folder), keeps=True, resume=step)  # fmt: skip
    if record is None:
        place.run(plan)
        return None
    steps, known = steps_of(record), len(list(metrics.read(folder)))
    label = f"{plan.workload}, {chosen.name}, {chosen.workers} workers"
    try:
        with Progress(folder, label, steps), stopping(folder):
            ended = place.run(plan)
    except (RankFailed, RuntimeError) as error:
        reached = metrics.last_step(folder, skip=known)
        saved = newest(folder / "checkpoints", chosen.workers)
        record.interruptions.append(interruptions.failure(error, reached, saved))
        conclude(record, folder)
        if isinstance(error, RankFailed):
            raise RankFailed(f"{error}; go on with: laconic train --resume {folder}", error.rank) from error
        raise
    if ended.trial is None:
        record.interruptions.append(interruptions.stopped(ended.step))
    else:
        record.trials = [replace(ended.trial, events=interruptions.marks(ended.trial, record.interruptions))]
        record.finished = True
    conclude(record, folder)
    return Finished(folder, record, ended.step, steps)


def conclude(record: Record, folder: Path) -> None:
    """Save what the record has come to, with its lint and its report."""
    record.lint = lint(record)
    record.save(folder)
    write_report(record, folder)
    control.forget(folder)


@contextlib.contextmanager
def stopping(folder: Path) -> Iterator[None]:
    """The first Ctrl-C (or SIGTERM) asks the workers for a checkpoint and their end; the second ends them at once.

    Within a second it is still the first: it may come both to the command and to its group.
    """
    asked: float | None = None

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        if asked is None:
            asked = time.monotonic()
            control.request_stop(folder)
        elif time.monotonic() > asked + 1.0:
            raise KeyboardInterrupt

    if launched_rank() is not None:  # the trainer listens itself
        yield
        return
    before = {number: signal.signal(number, ask) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _shared_folder(folder: Path | None, world: World) -> Path:
    """Rank 0's folder, on every rank of a launched job."""
    text = b"" if folder is None else str(folder.absolute()).encode()
    length = int(broadcast(torch.tensor([len(text)]), root=0, group=world).item())
    values = torch.tensor(list(text or bytes(length)), dtype=torch.uint8)
    return Path(bytes(broadcast(values, root=0, group=world).tolist()).decode())


def refuse_seed(seed: int) -> None:
    """A seed that no generator takes is refused before a run begins."""
    if not 0 <= seed < 2**63:
        raise BadInput(f"--seed must be from 0 to below 2⁶³, got {seed}")


def new_record(
    kind: Any,
    workload: Workload,
    workers: int,
    configurations: list[Configuration],
    place: Workers,
    tuning_runs: int | None,
    runs: Path,
    command: str,
) -> Record:
    """The record of a run that begins. It reads the data: what is missing is fetched, or named, before all else."""
    task = workload.prepare(0)
    described: Description = replace(task.describe(workers), target_accuracy=workload.target)
    return Record(
        kind=kind,
        id=make_id(workload.slug, runs),
        created=interruptions.now(),
        command=command,
        workload=described,
        scaling="strong" if workers > 1 else "none",
        clock=CLOCK,
        environment={**run_environment(), "blas_threads": 1},
        configurations=configurations,
        link=place.setting,
        tuning_runs=tuning_runs,
    )


def begin(record: Record, runs: Path) -> Path:
    """Save a new run's record; returns its folder, which `runs`/latest leads to from now on."""
    folder = runs / record.id
    record.save(folder)
    link = runs / f".latest-{os.getpid()}"
    with contextlib.suppress(OSError):  # a convenience, which not every file system has
        link.symlink_to(record.id)
        link.replace(runs / "latest")
    return folder


def steps_of(record: Record) -> int:
    """Steps of a training of the record's workload; the same for any number of workers, as the batch is divided."""
    batch = record.workload.batch or get(record.workload.name).batch  # records of before do not tell
    return int(record.workload.epochs) * -(-record.workload.train_samples // batch)


def show_warnings_as_sentences() -> None:
    """A warning is one line on standard error, without the place in the code that gave it."""
    warnings.formatwarning = lambda message, *_args, **_options: f"laconic: {message}\n"
