"""`laconic train --elastic`: a training that goes on when workers die.

Callers: `train`. The command takes no part in the training: workers agree among themselves (`laconic.elastic`) and
write down what they do (`journals.py`). Here their processes are started, watched and replaced, everything unexpected
is put into the record at once, and in the end the trial is made of what was written. Invariant: none of the processes
outlives the pool's block, however it is left.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import cast

from laconic.consistency.elastic.meeting import Meeting
from laconic.errors import StorageError
from laconic.storage.checkpoints import newest
from laconic.transports.launcher import LocalJob, Outcome, RankFailed, ending
from laconic_lab.runs import stopping
from laconic_lab.runs.elastic.journals import ExitRow, Journals, StartRow, as_interruptions, losses
from laconic_lab.runs.elastic.trial import elastic_trial
from laconic_lab.runs.elastic.worker import WorkerEnded, run_worker
from laconic_lab.runs.progress import Progress
from laconic_lab.runs.run import Run
from laconic_lab.runs.spec import TrialSpec
from laconic_lab.runs.trainer import Ended
from laconic_lab.runs.workers import Workers

_log = logging.getLogger("laconic_lab")
LOOK_S = 0.1
LAST_S = 15.0  # how long the others may take to end once one has; one that is stopped (SIGSTOP) never would
GIVEN_UP_S = 1.0  # after which a worker that others gave up, and whose process is there, has not just been killed
WAITING_S = 20.0  # without a first step for this long, say what it waits for
LEAST_PATIENCE = 3  # workers that may die in a row without a step in between


class WorkerPool:
    """The processes of one start; a context manager.

    `tick` is called about every LOOK_S; `note` gets a sentence when a worker is lost or awaited.
    """

    def __init__(
        self, trial: TrialSpec, workers: Workers, tick: Callable[[], None], note: Callable[[str], None]
    ) -> None:
        assert trial.folder is not None
        self._trial, self._workers, self._tick, self._note = trial, workers, tick, note
        self._journals = Journals(Path(trial.folder))
        self._jobs: dict[int, LocalJob[WorkerEnded]] = {}
        self._in_a_row, self._steps_nbytes = 0, 0
        self._tell_at: float | None = None

    def __enter__(self) -> WorkerPool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process that is left."""
        for job in self._jobs.values():
            job.kill()
        self._jobs.clear()

    @property
    def step(self) -> int:
        """The newest step that a worker has recorded in this start."""
        last = self._journals.steps.last()
        return last.step if last is not None and last.start == self._trial.start else self._trial.resume

    def run(self) -> list[WorkerEnded]:
        """Run until the training is over or stopped on request; return how each worker ended.

        Raises:
            RankFailed: all workers with the model died, or workers died repeatedly without a step in between.
        """
        done: list[WorkerEnded] = []
        ending_at: float | None = None
        self._start_all()
        while self._jobs:
            for index, job in self._ended():
                (outcome,) = job.outcomes(timeout_s=5.0)
                if not outcome.failed:
                    done.append(cast(WorkerEnded, outcome.value))
                else:
                    needed = index not in self._jobs and not self._is_ending(done)  # or all have begun again
                    self._lost(index, job, outcome, needed)
            if self._is_ending(done):
                ending_at = ending_at or time.monotonic() + LAST_S
            if ending_at is not None and time.monotonic() > ending_at:
                self.close()
            self._tell_of_waiting()
            self._tick()
        if not self._is_ending(done):
            raise RankFailed("the training is over, and nobody is left who had the final model")
        return done

    def _is_ending(self, done: list[WorkerEnded]) -> bool:
        """Whether a worker has ended with the final model, or all were asked to stop; latecomers have no model."""
        return any(each.digest for each in done) or stopping.is_stop_requested(self._journals.folder)

    def _start_all(self) -> None:
        for index in range(self._trial.configuration.workers):
            self._start(index)
        self._tell_at = time.monotonic() + WAITING_S

    def _start(self, index: int) -> None:
        self._jobs[index] = self._workers.start_one(index, run_worker, (replace(self._trial, index=index),))

    def _ended(self) -> list[tuple[int, LocalJob[WorkerEnded]]]:
        """The processes that have ended within LOOK_S, by index; they leave the pool."""
        pipes = {job.pipes[0]: index for index, job in self._jobs.items()}
        ended = [pipes[cast(Connection, pipe)] for pipe in wait(list(pipes), timeout=LOOK_S)]
        return [(index, self._jobs.pop(index)) for index in ended]

    def _lost(self, index: int, job: LocalJob[WorkerEnded], outcome: Outcome[WorkerEnded], needed: bool) -> None:
        """Record that a process has died, and start another if needed."""
        _log.info("worker process %s of %s was lost", job.processes[0].pid, self._journals.folder)
        step, pid = self.step, job.processes[0].pid or 0
        how = ending(outcome.exitcode) if outcome.error is None else f"failed: {outcome.error.splitlines()[0]}"
        try:
            self._journals.exits.add(ExitRow(self._trial.start, index, pid, time.time(), how, step))
        except StorageError as error:
            self._note(f"{error}; the training goes on")
        known = self._joined()
        who = f"worker {known[pid]}" if pid in known else "a worker that had not joined yet"
        if not needed:
            return self._note(f"{who} {how}")
        self._in_a_row = self._in_a_row + 1 if self._journals.steps.nbytes == self._steps_nbytes else 1
        self._steps_nbytes = self._journals.steps.nbytes
        is_gone = self._is_founded() and not self._present()
        if is_gone and self._has_stepped():
            raise RankFailed(f"{who} {how} after step {step}, and nobody is left who had the model")
        if self._in_a_row > max(LEAST_PATIENCE, self._trial.configuration.workers):
            raise RankFailed(f"{self._in_a_row} workers died in a row without a step in between; {who} {how}")
        if is_gone:
            self._note(f"{who} {how} before the first step; all begin again")
            return self._begin_again()
        self._note(f"{who} {how} after step {step}; another is started in its place")
        self._start(index)

    def _begin_again(self) -> None:
        """Start all workers again with new numbers: no member is left to join, and nothing was trained yet."""
        self.close()
        meeting = self._journals.meeting(self._trial.start)
        for path in [*meeting.glob("view-*.json"), *meeting.glob("events.jsonl")]:
            path.unlink()
        self._start_all()

    def _is_founded(self) -> bool:
        return Meeting(self._journals.meeting(self._trial.start)).newest() is not None

    def _has_stepped(self) -> bool:
        last = self._journals.steps.last()
        return last is not None and last.start == self._trial.start

    def _present(self) -> list[int]:
        """The numbers of the living processes that have joined."""
        known = self._joined()
        pids = [job.processes[0].pid or 0 for job in self._jobs.values()]
        return [known[pid] for pid in pids if pid in known]

    def _tell_of_waiting(self) -> None:
        """Report once how many workers the first step still waits for; a stopped one (SIGSTOP) is not replaced."""
        if self._tell_at is None or time.monotonic() < self._tell_at:
            return
        self._tell_at = None
        joined, wanted = len(self._present()), self._trial.configuration.workers
        if not self._has_stepped() and joined < wanted:
            self._note(f"no step yet: the first one waits for {wanted} workers, {joined} of them have joined")

    def _joined(self) -> dict[int, int]:
        """The number of each process that has joined in this start."""
        rows = self._journals.workers.read()
        return {row.pid: row.worker for row in rows if row.start == self._trial.start}


class Elastic:
    """Workers that are replaced when they die."""

    def __init__(self, run: Run, workers: Workers) -> None:
        self._run, self._workers = run, workers
        self._journals = Journals(run.folder)
        self._told: set[object] = set()

    def saved(self) -> int:
        """The newest step to resume from: the end of an epoch."""
        return newest(self._run.folder / "checkpoints", 1) or 0

    def reached(self) -> int:
        """The last step that a worker of this start has recorded."""
        rows = self._journals.steps.read()
        return max((row.step for row in rows if row.start == self._run.record.starts), default=0)

    def train(self, trial: TrialSpec, progress: Progress) -> Ended:
        """Train from the trial's checkpoint on; see `Driver`."""
        self._journals.starts.add(StartRow(trial.start, trial.resume))
        trial = self._workers.told(trial)
        try:
            tick = functools.partial(self.write_down, progress.note)
            with WorkerPool(trial, self._workers, tick, progress.note) as pool:
                ended = pool.run()
        finally:
            self.write_down(progress.note)
        if not any(each.digest for each in ended):
            return Ended(pool.step)
        workload = trial.changes.of(trial.workload)
        return Ended(pool.step, elastic_trial(self._run.record, trial, workload, ended))

    def write_down(self, note: Callable[[str], None]) -> None:
        """Add the workers' losses so far to the record, and save it if there are new ones.

        Report workers that the others gave up although their process lives; the pool reports how processes end.
        """
        record, lost = self._run.record, losses(self._journals)
        for each in lost:
            if each.given_up and each not in self._told and time.time() > each.when + GIVEN_UP_S:
                self._told.add(each)
                note(each.sentence)
        ends = [each for each in record.interruptions if each.ended]
        found = sorted([*ends, *as_interruptions(lost)], key=lambda each: each.when)
        if found == record.interruptions:
            return
        record.interruptions = found
        try:
            self._run.save()
        except StorageError as error:  # it is saved with the next news, and at the end
            note(f"{error}; the training goes on")
