"""`laconic compare`: configurations × seeds, measured in turn, with claims, lint and report.

Callers: the command line and the demo. For a seed every configuration starts from the same weights and sees the same
batches. Trials are interleaved seed by seed, the first configuration changing each time, so that a slow minute of the
machine falls on all alike.
"""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from laconic.errors import BadInput, LaconicError
from laconic.lab.records import interruptions
from laconic.lab.records import metrics
from laconic.lab.runs.budget import budget_of
from laconic.lab.records.claims import make_claims
from laconic.lab.runs.configurations import configuration
from laconic.lab.runs.control import only_one
from laconic.lab.records.interruptions import first_line
from laconic.lab.clusters.launch import is_launched
from laconic.lab.lint import lint
from laconic.lab.runs.progress import Progress
from laconic.lab.records.record import Configuration, Record, Trial
from laconic.lab.report import words, write_report
from laconic.lab.runs.train import begin, new_record, refuse_seed, run_folder, steps_of, unfinished
from laconic.lab.runs.trainer import Plan
from laconic.lab.runs.trial import failed_trial
from laconic.lab.runs.workers import Workers, ruler
from laconic.workloads import AS_DECLARED, Changes

STARTS_WORKERS = "compare starts its own workers for every trial: run it without torchrun or mpiexec"


def compare(
    workload: str,
    workers: int,
    configs: Sequence[str],
    *,
    consistency: Sequence[str] = ("sync",),
    slow: float = 1.0,
    seeds: int = 3,
    first_seed: int = 0,
    link: str | None = None,
    hosts: int | None = None,
    changes: Changes = AS_DECLARED,
    tuning_runs: int | None = None,
    runs: Path = Path("runs"),
    command: str = "",
    note: Callable[[str], None] = lambda line: None,
) -> tuple[Record, Path]:
    """Train a workload by every configuration and seed; returns the record and the run's folder.

    The record is saved after every trial: what is done stays, however the run ends, and `resume` goes on from there.

    Args:
        configs: peers, `single` or codec specs.
        consistency: when workers agree; codecs are combined with each.
        slow: the last worker computes this many times as long; 1 for all alike.
        changes: what is asked of the workload in place of its own.
        note: told a sentence after each trial.

    Raises:
        BadInput: a name that is not known, or a value that cannot be used.
    """
    if is_launched():
        raise BadInput(STARTS_WORKERS)
    if not 1 <= slow < 1000:
        raise BadInput(f"--slow must be from 1 to below 1000, got {slow}")
    refuse_seed(first_seed)
    if seeds < 1:
        raise BadInput(f"--seeds must be at least 1, got {seeds}")
    chosen_workload = changes.of(workload)
    with Workers(workers, link, hosts) as place:
        chosen = [_told(each, place, slow) for each in combined(configs, consistency, workers)]
        record = new_record("compare", chosen_workload, workers, chosen, place, tuning_runs, runs, command)
        record.seeds, record.slow = list(range(first_seed, first_seed + seeds)), slow
        return _run(record, begin(record, runs), place, note)


def resume(
    folder: Path, workload: str | None = None, note: Callable[[str], None] = lambda line: None
) -> tuple[Record, Path]:
    """Go on with a comparison that was interrupted, with the trial that it was in.

    Raises:
        RecordError: there is no such run.
        BadInput: it is finished, no comparison, or of another workload.
    """
    if is_launched():
        raise BadInput(STARTS_WORKERS)
    folder = run_folder(folder)
    record = unfinished(folder, "compare", workload)
    if not record.seeds:
        raise BadInput(f"{folder} does not say which seeds it has still to try; start it again")
    hosts = record.link.hosts if record.link.emulated else None
    workers = max(hosts or 1, *(each.workers for each in record.configurations))
    with Workers(workers, record.link.spec, hosts) as place:
        return _run(record, folder, place, note, resumed=True)


def _run(
    record: Record, folder: Path, place: Workers, note: Callable[[str], None], resumed: bool = False
) -> tuple[Record, Path]:
    """The trials that are not there yet, and what they say together."""
    with only_one(folder), _interruptible():
        if resumed:
            interruptions.note_resumed_comparison(record, folder)
            record.save(folder)
        return _run_alone(record, folder, place, note)


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """SIGTERM is what Ctrl-C is, once: it may come both to the command and to its group."""
    def interrupt(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # which alone has signals
        yield
        return
    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _run_alone(record: Record, folder: Path, place: Workers, note: Callable[[str], None]) -> tuple[Record, Path]:
    chosen = record.configurations
    turns = [(seed, each) for number, seed in enumerate(record.seeds) for each in _rotated(chosen, number)]
    try:
        for seed, each in turns[len(record.trials) :]:
            position = f"{len(record.trials) + 1}/{len(turns)}"
            record.trials.append(_trial(record, place, each, seed, folder, position))
            record.save(folder)
            note(f"{position} {_spoken(record.trials[-1])}")
    except KeyboardInterrupt:
        interruptions.comparison_ended(record, "stopped on request")
        conclude(record, folder)
        note(f"stopped: {len(record.trials)} of {len(turns)} trials are in {folder}; "
             f"go on with: laconic compare --resume {folder}")  # fmt: skip
        raise
    record.finished = True
    conclude(record, folder)
    return record, folder


def conclude(record: Record, folder: Path) -> None:
    """Claims, lint and report from the trials that are there."""
    base = baseline(record)
    record.claims = [] if base is None else make_claims(record, base)
    record.lint = lint(record)
    record.save(folder)
    write_report(record, folder)


def baseline(record: Record) -> str | None:
    """What the others are compared with: the first peer that trained, or else the first configuration that did."""
    trained = [c for c in record.configurations if record.trials_of(c.name)]
    peers = [c.name for c in trained if c.kind == "peer"]
    return next(iter([*peers, *(c.name for c in trained)]), None)


def combined(configs: Sequence[str], consistency: Sequence[str], workers: int) -> list[Configuration]:
    """Every codec with every consistency; peers and `single`, which have their own, once.

    >>> [each.name for each in combined(["ddp", "none"], ["sync", "local(4)"], 4)]
    ['ddp', 'sync', 'local(4)']
    """
    made = [configuration(name, workers, consistency=mode) for name in configs for mode in consistency]
    if len(consistency) > 1:  # then what differs is when workers agree
        made = [replace(each, name=each.consistency) if each.name == "none" else each for each in made]
    return list({each.name: each for each in made}.values())


def _told(chosen: Configuration, place: Workers, slow: float) -> Configuration:
    told: dict[str, Any] = {"bytes": ruler(place.counted_by(chosen.workers), chosen.kind)}
    if slow > 1:
        told["slow_worker"] = f"rank {chosen.workers - 1} computes {slow:g} times as long"
    return replace(chosen, options={**chosen.options, **told})


def _rotated(chosen: Sequence[Configuration], by: int) -> list[Configuration]:
    turn = by % len(chosen)
    return [*chosen[turn:], *chosen[:turn]]


def _trial(
    record: Record, place: Workers, chosen: Configuration, seed: int, folder: Path, position: str
) -> Trial:
    """One training; one that breaks is a trial that failed, and the run goes on."""
    order = len(record.trials)
    changes, known = Changes.recorded(record.workload), len(list(metrics.read(folder)))
    plan = Plan(record.workload.name, chosen, seed, changes, order, str(folder), slow=record.slow)
    budget_of(folder, order).unlink(missing_ok=True)  # of a start that was cut off in this trial
    label = f"{position} {chosen.name}, seed {seed}"
    try:
        with Progress(folder, label, steps_of(record), lines=False):
            trial = place.run(plan).trial
    except LaconicError as error:
        reached = metrics.last_step(folder, order, known)
        where = "" if reached is None else f" (after step {reached} of {steps_of(record)})"
        return failed_trial(chosen.name, seed, order, first_line(error) + where)
    assert trial is not None  # nobody asks a comparison's workers to stop
    return trial


def _spoken(trial: Trial) -> str:
    """A trial in a sentence."""
    who = f"{trial.configuration}, seed {trial.seed}"
    if trial.failed is not None:
        return f"{who}: failed: {trial.failed}"
    quality = f"test loss {trial.test_loss:.4g}" if trial.test_accuracy is None else words.percent(trial.test_accuracy)
    return f"{who}: {quality} after {trial.seconds_total:.1f} s, {words.seconds(trial.step_seconds_median)} a step"
