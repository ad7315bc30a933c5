"""`laconic compare`: configurations × seeds, measured in turn, with claims, lint and report.

Callers: the command line and the demo. For a seed every configuration starts from the same weights and sees the same
batches. Trials are interleaved seed by seed, the first configuration changing each time, so that a slow minute of the
machine falls on all alike.
"""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Sequence
from pathlib import Path

from laconic import words
from laconic.errors import BadInput, LaconicError, StorageError
from laconic.storage.run_folders import only_one
from laconic_lab.clusters.launch import is_launched
from laconic_lab.records import interruptions, metrics
from laconic_lab.records.interruptions import first_line
from laconic_lab.records.record import Configuration, Record, TrialRecord
from laconic_lab.runs.progress import Progress
from laconic_lab.runs.run import Run
from laconic_lab.runs.spec import RunSpec, combined
from laconic_lab.runs.stopping import on_signal
from laconic_lab.runs.trial import failed_trial
from laconic_lab.runs.unsynchronised import shares_file
from laconic_lab.runs.workers import Workers

Note = Callable[[str], None]
STARTS_WORKERS = "compare starts its own workers for every trial: run it without torchrun or mpiexec"
_log = logging.getLogger("laconic_lab")


def compare(
    spec: RunSpec, modes: Sequence[str] = ("sync",), note: Note = lambda line: None
) -> tuple[Record, Path]:
    """Train a workload by every configuration and seed; returns the record and the run's folder.

    The record is saved after every trial: what is done stays, however the run ends, and `resume` goes on from there.

    Args:
        modes: when workers agree; codecs are combined with each.
        note: given a sentence after each trial.

    Raises:
        BadInput: a name that is not known, or a value that cannot be used.
        StorageError: the disk is full; the sentence says how many trials are kept, and how to go on.
    """
    if is_launched():
        raise BadInput(STARTS_WORKERS)
    spec.changes.of(spec.workload)  # refused before anything is started
    with Workers(spec.workers, spec.link, spec.hosts, spec.between) as workers:
        chosen = combined(spec.configurations, modes, spec.workers)
        if elastic := [each.name for each in chosen if each.kind == "elastic"]:
            raise BadInput(f"'{elastic[0]}' is for `laconic train --elastic`; compare starts and ends workers together")
        return _run(Run.begin("compare", spec, workers, chosen), workers, note)


def resume(folder: Path, workload: str | None = None, note: Note = lambda line: None) -> tuple[Record, Path]:
    """Go on with a comparison that was interrupted, with the trial that it was in.

    Raises:
        RecordError: there is no such run.
        BadInput: it is finished, no comparison, or of another workload.
    """
    if is_launched():
        raise BadInput(STARTS_WORKERS)
    run = Run.resume(folder, "compare", workload)
    if not run.record.seeds:
        raise BadInput(f"{run.folder} does not say which seeds it has still to try; start it again")
    with run.workers() as workers:
        return _run(run, workers, note, resumed=True)


def _run(run: Run, workers: Workers, note: Note, resumed: bool = False) -> tuple[Record, Path]:
    """Run the missing trials, and summarise all."""
    record, folder = run.record, run.folder
    turns = [(seed, each) for by, seed in enumerate(record.seeds) for each in _rotated(record.configurations, by)]
    with run.says_how_to_go_on(), only_one(folder), on_signal(_interrupt, signal.SIGTERM):
        if resumed:
            interruptions.note_resumed_comparison(record, folder)
            run.save()
        kept = len(record.trials)
        try:
            for seed, each in turns[len(record.trials) :]:
                position = f"{len(record.trials) + 1}/{len(turns)}"
                record.trials.append(_trial(run, workers, each, seed, position))
                run.save()
                kept = len(record.trials)
                note(f"{position} {_spoken(record.trials[-1])}")
        except KeyboardInterrupt:
            interruptions.comparison_ended(record, "stopped on request")
            run.conclude()
            note(f"stopped: {len(record.trials)} of {len(turns)} trials are in {folder}; "
                 f"go on with: laconic compare --resume {folder}")  # fmt: skip
            raise
        except StorageError as error:
            del record.trials[kept:]  # as it is in the file: the trial is made again
            interruptions.comparison_ended(record, first_line(error))
            text = f"{kept} of {len(turns)} trials are in the record{run.try_to_conclude()}"
            raise StorageError(f"{error}; {text}", error.errno) from error
        record.finished = True
        run.conclude()
    return record, folder


def _interrupt(number: int, frame: object) -> None:
    """Treat SIGTERM as Ctrl-C, once: it may reach both the command and its group."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt


def _rotated(chosen: Sequence[Configuration], by: int) -> list[Configuration]:
    turn = by % len(chosen)
    return [*chosen[turn:], *chosen[:turn]]


def _trial(run: Run, workers: Workers, chosen: Configuration, seed: int, position: str) -> TrialRecord:
    """Run one training; if it breaks, record a failed trial and go on.

    A full disk does not count as a failed trial: it says nothing about the configuration, and would recur.
    """
    spec, folder, known = run.trial(chosen, seed), run.folder, len(list(metrics.read(run.folder)))
    shares_file(folder, spec.order).unlink(missing_ok=True)  # of a start that was cut off in this trial
    try:
        with Progress(folder, f"{position} {chosen.name}, seed {seed}", run.steps, lines=False):
            trial = workers.run(spec).trial
    except StorageError:
        raise
    except LaconicError as error:
        _log.info("%s, seed %d: %s", chosen.name, seed, error)
        reached = metrics.last_step(folder, spec.order, known)
        where = "" if reached is None else f" (after step {reached} of {run.steps})"
        return failed_trial(chosen.name, seed, spec.order, first_line(error) + where)
    assert trial is not None  # nobody asks a comparison's workers to stop
    return trial


def _spoken(trial: TrialRecord) -> str:
    """A trial in a sentence."""
    who = f"{trial.configuration}, seed {trial.seed}"
    if trial.failed is not None:
        return f"{who}: failed: {trial.failed}"
    quality = f"test loss {trial.test_loss:.4g}" if trial.test_accuracy is None else words.percent(trial.test_accuracy)
    return f"{who}: {quality} after {trial.seconds_total:.1f} s, {words.seconds(trial.step_seconds_median)} a step"
