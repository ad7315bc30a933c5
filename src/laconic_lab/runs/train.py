"""`laconic train`: one training, begun or resumed, to its record and report.

Callers: the command line. Ranks that live and die together (`workers.py`) and workers that are replaced when they die
(`elastic/`) are two drivers of the same run.
"""

from __future__ import annotations

import contextlib
import logging
import signal
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from laconic import words
from laconic.errors import BadInput, CheckpointError, StorageError
from laconic.exchange.collectives import broadcast
from laconic.storage.checkpoints import newest
from laconic.storage.run_folders import only_one
from laconic.transports.launcher import RankFailed
from laconic.transports.world import World, init
from laconic_lab.clusters.launch import is_launched, launched_rank
from laconic_lab.records import interruptions, metrics
from laconic_lab.records.record import Record
from laconic_lab.runs import stopping
from laconic_lab.runs.elastic.driver import Elastic
from laconic_lab.runs.progress import Progress
from laconic_lab.runs.run import Run
from laconic_lab.runs.spec import SINGLE, RunSpec, TrialSpec, configuration
from laconic_lab.runs.strategies import PEERS
from laconic_lab.runs.trainer import Ended
from laconic_lab.runs.workers import TIMEOUT_S, Workers

LONGEST_PATH = 4096  # in bytes, on Linux
AGAIN_S = 1.0  # how soon a second signal is still the first
_log = logging.getLogger("laconic_lab")


@dataclass(frozen=True)
class Finished:
    """How a training ended: its folder, its record, and after how many steps of how many."""

    folder: Path
    record: Record
    step: int
    steps: int


class Ranks:
    """Makes the workers of a run train: ranks that live and die together."""

    def __init__(self, run: Run, workers: Workers) -> None:
        self._run, self._workers = run, workers
        self._known = 0  # lines of metrics that earlier starts wrote

    def saved(self) -> int:
        """The newest step to resume from; 0 without one."""
        return newest(self._run.folder / "checkpoints", self._run.record.configurations[0].workers) or 0

    def reached(self) -> int:
        """The last known step."""
        return metrics.last_step(self._run.folder, skip=self._known) or 0

    def train(self, trial: TrialSpec, progress: Progress) -> Ended:
        """Train to the end, or to a request to stop; RankFailed when workers died, and the training with them."""
        self._known = len(list(metrics.read(self._run.folder)))
        ended = self._workers.run(trial)
        if ended.trial is None:
            return ended
        marks = interruptions.marks(ended.trial, self._run.record.interruptions)
        return replace(ended, trial=replace(ended.trial, events=marks))


def train(spec: RunSpec) -> Finished | None:
    """Train a workload; None on the ranks of a launched job other than 0.

    Raises:
        BadInput: a name that is not known, or a value that cannot be used.
        RankFailed: a worker raised or died; the sentence says how to go on.
        StorageError: the disk is full; the sentence says how to go on.
    """
    (name,) = spec.configurations
    if name in (*PEERS, SINGLE):
        raise BadInput(f"'{name}' is for `laconic compare`; train takes a codec, or none")
    if name.startswith("elastic:") and is_launched():
        raise BadInput("--elastic starts and replaces its own workers: run it without torchrun or mpiexec")
    spec.changes.of(spec.workload)  # refused before anything is started
    with Workers(spec.workers, spec.link, spec.hosts, spec.between) as workers:
        if not workers.launched:
            chosen = configuration(name, workers.count, spec.algorithm)
            return _train(Run.begin("train", spec, workers, [chosen]), workers)
        with init(timeout_s=TIMEOUT_S) as world:
            workers.count = world.world_size
            chosen = configuration(name, world.world_size, spec.algorithm, world.engine)
            own = Run.begin("train", spec, workers, [chosen]) if world.rank == 0 else None
            folder = _shared_folder(None if own is None else own.folder, world)
        if own is None:
            _follow(folder, workers)
            return None
        return _train(own, workers)


def resume(folder: Path, workload: str | None = None) -> Finished | None:
    """Go on with a run that was interrupted, from its newest whole checkpoint.

    Raises:
        RecordError: there is no such run.
        BadInput: it is finished, no training, or of another workload.
        CheckpointError: it has checkpoints, and none is whole.
        StorageError: the disk is full; the sentence says how to go on.
    """
    run = Run.resume(folder, "train", workload)
    with run.workers() as workers:
        if launched_rank() not in (None, 0):
            _follow(run.folder, workers)
            return None
        return _train(run, workers, resumed=True)


def _follow(folder: Path, workers: Workers) -> None:
    """Train on a rank of a launched job that keeps no record."""
    run = Run(folder, Record.load(folder))
    workers.run(_trial(run, Ranks(run, workers).saved()))


def _trial(run: Run, step: int) -> TrialSpec:
    trial = run.trial(run.record.configurations[0], run.record.seeds[0])
    return replace(trial, keeps=True, resume=step)


def _train(run: Run, workers: Workers, *, resumed: bool = False) -> Finished:
    """Train from the newest checkpoint, if any; record how it ended."""
    record, folder, (chosen,) = run.record, run.folder, run.record.configurations
    driver: Ranks | Elastic = Elastic(run, workers) if chosen.kind == "elastic" else Ranks(run, workers)
    with run.says_how_to_go_on(), only_one(folder):
        step = driver.saved()
        stopping.forget(folder)
        if resumed:
            if step == 0:
                _explain_beginning_again(run)
            _log.info("%s: going on from step %d", folder, step)
            interruptions.note_resumption(record, folder, step, driver.reached())
            run.save()
        with _asking_to_stop(folder) as over:
            ended = _trained(run, driver, step, over)
            over()
            if ended.trial is None:
                lost = max(0, ended.step - driver.saved())
                record.interruptions.append(interruptions.stopped(ended.step, lost))
            else:
                record.trials, record.finished = [ended.trial], True
            run.conclude()
    return Finished(folder, record, ended.step, run.steps)


def _explain_beginning_again(run: Run) -> None:
    """Why a resumed training begins from step 0: no checkpoint was made yet.

    Raises:
        CheckpointError: the record knows of one.
    """
    folder = run.folder / "checkpoints"
    saved = max((each.step - each.lost for each in run.record.interruptions if each.ended and each.step), default=0)
    if saved > 0:
        text = f"{folder}: the checkpoint of step {saved} is gone; put it back, or start another run"
        raise CheckpointError(f"{text} to begin from step 0")
    warnings.warn(f"{folder} has no checkpoint yet: the training begins again from step 0", stacklevel=2)


def _trained(run: Run, driver: Ranks | Elastic, step: int, over: Callable[[], None]) -> Ended:
    """Train and return the outcome; an error is recorded and reported before it is raised."""
    record, folder, (chosen,) = run.record, run.folder, run.record.configurations
    label = f"{record.workload.name}, {chosen.name}, {words.count(chosen.workers, 'worker')}"
    try:
        with Progress(folder, label, run.steps) as progress:
            return driver.train(_trial(run, step), progress)
    except KeyboardInterrupt:
        over()
        reached = driver.reached()
        record.interruptions.append(interruptions.stopped(reached, max(0, reached - _saved_by(driver))))
        run.try_to_conclude()
        raise
    except (RankFailed, StorageError, RuntimeError) as error:
        over()
        _log.info("%s: %s", folder, error)
        record.interruptions.append(interruptions.failure(error, driver.reached(), _saved_by(driver)))
        unkept = run.try_to_conclude()
        if isinstance(error, StorageError):
            raise StorageError(f"{error}{unkept}", error.errno) from error
        if isinstance(error, RankFailed):
            text = f"{error}{unkept}; go on with: laconic train --resume {folder}"
            raise RankFailed(text, error.rank) from error
        raise


def _saved_by(driver: Ranks | Elastic) -> int:
    """The step that a failed training can be gone on from; the resumption says so where all files are damaged."""
    try:
        return driver.saved()
    except CheckpointError:
        return 0


@contextlib.contextmanager
def _asking_to_stop(folder: Path) -> Iterator[Callable[[], None]]:
    """The first Ctrl-C (or SIGTERM) asks the workers for a checkpoint and their end; the second ends them at once.

    Within AGAIN_S it is still the first: it may come both to the command and to its group. Once the function that the
    block is given was called, the training is over: what comes then must not keep the report from being written.
    """
    asked: float | None = None
    is_over = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked, is_over
        if is_over:
            return
        if asked is None:
            asked = time.monotonic()
            stopping.request_stop(folder)
        elif time.monotonic() > asked + AGAIN_S:
            is_over = True
            raise KeyboardInterrupt

    def over() -> None:
        nonlocal is_over
        is_over = True

    signals = () if is_launched() else (signal.SIGINT, signal.SIGTERM)  # a launched trainer listens itself
    with stopping.on_signal(ask, *signals):
        yield over


def _shared_folder(folder: Path | None, world: World) -> Path:
    """Rank 0's folder, on every rank of a launched job."""
    text = (b"" if folder is None else str(folder.absolute()).encode()).ljust(LONGEST_PATH, b"\0")
    values = torch.frombuffer(bytearray(text), dtype=torch.uint8)
    return Path(bytes(broadcast(values, root=0, group=world).tolist()).rstrip(b"\0").decode())
