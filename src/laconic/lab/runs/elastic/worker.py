"""One worker of an elastic training: the workload's task, trained through `laconic.elastic`.

Callers: `pool.py` starts as many as were asked for, and another for each that dies. All meet in the run's folder, where
everything that has to outlive a worker is written too: the journals, and in checkpoints/ model and optimiser at the end
of the last two epochs.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
import warnings
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from laconic.consistency.churn.job import ElasticJob
from laconic.consistency.churn.options import Samples
from laconic.consistency.churn.wire import MAX_MEMBERS
from laconic.consistency.elastic import elastic
from laconic.errors import BadInput
from laconic.lab.runs import stopping
from laconic.lab.runs.elastic.journals import EvaluationRow, Journals, StepRow, WorkerRow
from laconic.lab.runs.monitor import Monitor, SentCounter
from laconic.lab.runs.spec import Prepared, TrialSpec
from laconic.lab.runs.trainer import compute_repeatably, weights_digest
from laconic.lab.runs.trial import StepFigures
from laconic.storage.checkpoints import CheckpointFiles
from laconic.workloads.description import Description

PATIENCE_S = 30.0  # a first step may take this long; who is killed is noticed at once all the same
LAST_TEST_S = 15.0  # besides four times the longest test so far, how long others wait for who tests the final model


@dataclass(frozen=True)
class WorkerEnded:
    """How a worker's part ended; `finished` with the whole training, else on request."""

    worker: int
    finished: bool
    digest: str


def check_size(workload: Description, workers: int) -> None:
    """Everyone needs a sample of every step: the coordinator too, which tests and writes checkpoints between them.

    Raises:
        BadInput: too many workers.
    """
    samples, batch = workload.train_samples, workload.batch or workload.train_samples
    most = min(samples // -(-samples // batch), MAX_MEMBERS)
    if workers > most:
        why = f"a group has at most {MAX_MEMBERS}, and each a sample of every step ({workload.name}: {most})"
        raise BadInput(f"--elastic takes 1 to {most} workers here: {why}; got {workers}")


def run_worker(trial: TrialSpec) -> WorkerEnded:
    """Train in this process until the training is over, or a stop is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command that started us takes Ctrl-C
    compute_repeatably()
    return ElasticWorker(trial).run()


class ElasticWorker:
    """The state of one worker."""

    def __init__(self, trial: TrialSpec) -> None:
        assert trial.folder is not None
        self.trial, self.folder = trial, Path(trial.folder)
        self.journals, self.checkpoints = Journals(self.folder), CheckpointFiles(self.folder / "checkpoints")
        self.workload = trial.changes.of(trial.workload)
        self.prepared = Prepared(trial, self.workload)
        self.task, self.steps_per_epoch = self.prepared.task, self.prepared.steps_per_epoch
        self.optimizer = self.task.optimizer(self.task.model.parameters())
        if trial.resume:
            self._restore(trial.resume)
        self._monitor = Monitor(self.folder, trial.order, self.prepared.samples_per_step)
        self._sent = SentCounter(trial.counted_by)
        self._block: list[StepRow] = []  # steps that are not committed yet
        self._known_as = 0

    def run(self) -> WorkerEnded:
        """Every step that is left."""
        trial, chosen = self.trial, self.trial.configuration
        warnings.filterwarnings("ignore", message="the job in .* has finished")  # a late replacement; the command knows
        epochs = self.workload.epochs - trial.resume // self.steps_per_epoch
        data = Samples(len(self.task.data.train), self.task.global_batch(1), epochs, _order_seed(trial))
        with elastic(
            self.task.model, self.optimizer, data, self.journals.meeting(trial.start), workers=chosen.workers,
            scheduler=LambdaLR(self.optimizer, self._rate), patience_s=PATIENCE_S, codec=chosen.codec,
            consistency=chosen.consistency,
        ) as job:  # fmt: skip
            with contextlib.suppress(BadInput):  # the training was over before this worker came
                self._introduce(job)
            for numbers in job.batches():
                if stopping.is_stop_requested(self.folder):
                    return WorkerEnded(job.worker, False, "")
                self._introduce(job)
                self._evaluate_if_due(job)
                self._step(job, numbers)
            if not job.finished:
                return WorkerEnded(0, True, "")
            self._evaluate_last(job.worker)
            return WorkerEnded(job.worker, True, weights_digest(self.task.model).hex())

    def _made(self, job: ElasticJob) -> int:
        """Steps of the whole training that are in the weights."""
        return self.trial.resume + job.steps

    def _rate(self, steps: int) -> float:
        """The schedule's factor after so many committed steps of this start; as `Task.begin_step` has it."""
        epoch, step = divmod(min(self.trial.resume + steps, self.prepared.total_steps - 1), self.steps_per_epoch)
        return self.workload.plan((epoch + step / self.steps_per_epoch) / self.workload.epochs)

    def _introduce(self, job: ElasticJob) -> None:
        """Leave a note of who this is, once under each number."""
        if job.worker == self._known_as:
            return
        self._known_as = job.worker
        row = WorkerRow(job.worker, self.trial.start, self.trial.index, os.getpid(), self.prepared.loading_s)
        self.journals.workers.add(row)
        self._sent.restart()

    def _step(self, job: ElasticJob, numbers: torch.Tensor) -> None:
        """One step with this worker's share of it; its row is written once it is committed, alone or with a block."""
        view, members, worker, committed = job.view, job.members, job.worker, job.steps
        if self._block and self._block[0].view != view:
            self._block.clear()  # given up: its samples come again
        began, made = time.monotonic(), self._made(job) + len(self._block)
        epoch, step = divmod(made, self.steps_per_epoch)
        # The rate is set once more to what the scheduler has set; what is needed is the random state for dropout.
        self.task.begin_step(self.optimizer, epoch, step, members.index(worker))
        loss = self.task.loss(self.task.model, self.task.batch_of(epoch, numbers))
        loss.backward()  # type: ignore[no-untyped-call]
        computed = time.monotonic()
        if not job.step():
            return self._block.clear()
        self._block.append(StepRow(
            made + 1, self.trial.start, view, len(members), worker, members[0] == worker, began, time.monotonic(),
            computed - began, 0.0, self._sent.taken(), float(loss.detach()), len(numbers),
        ))  # fmt: skip
        if job.steps > committed:
            self._write(job)

    def _write(self, job: ElasticJob) -> None:
        """Write the rows of steps that are committed now."""
        records = {self.trial.resume + each.step + 1: each for each in job.records[-2 * len(self._block) :]}
        for row in self._block:
            own = records[row.step]
            row = replace(row, wait=own.wait_s, sent=row.sent if self._sent.is_used else float(own.sent_nbytes))
            self.journals.steps.add(row)
            self._monitor.note(StepFigures(row.at - row.began, row.compute, 0.0, row.wait, 0.0, row.sent, row.loss))
        last = self._block[-1]
        self._block.clear()
        if last.coordinator and self._monitor.is_due():
            self._monitor.show(last.step)

    def _evaluate_if_due(self, job: ElasticJob) -> None:
        """The coordinator tests the model at an epoch's end; the others wait for it, with the clock at rest.

        One that takes over from a coordinator that died while testing tests anew.
        """
        made = self._made(job)
        due = made > self.trial.resume and made % self.steps_per_epoch == 0
        if due and job.members[0] == job.worker and not self._is_tested(made):
            with job.busy():
                self._evaluate(made, job.worker)

    def _evaluate_last(self, worker: int) -> None:
        """One of those who hold the final model tests it: who locks the journal of evaluations.

        If it dies over that, the next one does; if it is stopped, the others do without the lock after a while.
        """
        longest_s = max((row.took for row in self.journals.evaluations.read()), default=0.0)
        until = time.monotonic() + LAST_TEST_S + 4 * longest_s
        with open(self.journals.evaluations.path, "ab") as journal:
            while not self._is_tested(self.prepared.total_steps):
                free = time.monotonic() > until or _is_locked_by_us(journal)
                if free and not self._is_tested(self.prepared.total_steps):  # or the lock was let go of in between
                    return self._evaluate(self.prepared.total_steps, worker)
                time.sleep(0.05)

    def _is_tested(self, made: int) -> bool:
        return any((row.start, row.step) == (self.trial.start, made) for row in self.journals.evaluations.read())

    def _evaluate(self, made: int, worker: int) -> None:
        begun = time.monotonic()
        scores = self.task.evaluate(self.task.model)
        loss, accuracy, reached = scores["loss"], scores.get("accuracy"), self.task.reached(scores)
        state = {"model": self.task.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        self.checkpoints.write(made, state)
        took = time.monotonic() - begun
        self.journals.evaluations.add(EvaluationRow(made, self.trial.start, worker, took, loss, accuracy, reached))
        self._monitor.show(made, test_accuracy=accuracy, test_loss=loss)

    def _restore(self, step: int) -> None:
        kept: dict[str, Any] = self.checkpoints.read(step)
        self.task.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.workload.learning_rate


def _is_locked_by_us(file: IO[bytes]) -> bool:
    """Lock a file unless another process has; whoever closes it or dies lets go of it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _order_seed(trial: TrialSpec) -> int:
    """Of the order of the data: another one after a resumption, which begins with the ledger's first epoch again."""
    return trial.seed + 1_000_003 * trial.resume
