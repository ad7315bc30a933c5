"""One worker of an elastic training: the workload's task, trained through `laconic.elastic`.

Callers: `elastic_run.py` starts as many as were asked for, and another for each that dies. All meet in the run's
folder, where everything that has to outlive a worker is written too:

    steps.jsonl          a row for each step from each worker that made it
    evaluations.jsonl    a row for each evaluation, from whoever was coordinator
    workers.jsonl        who has joined, under which number and process
    checkpoints/         model and optimiser at the end of the last two epochs

Invariant: a row of a later start or view replaces those of the same step from earlier ones: that step was made again.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
import warnings
from collections import deque
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from laconic.consistency.churn.job import ElasticJob, elastic
from laconic.errors import BadInput
from laconic.lab.records.journal import Journal
from laconic.lab.records.metrics import Metrics
from laconic.lab.runs import control
from laconic.lab.runs.trainer import SHOWN_EVERY_S, compute_repeatably, interface_nbytes, load_software, weights_digest
from laconic.storage.checkpoints import CheckpointFiles
from laconic.workloads import Changes

PATIENCE_S = 30.0  # a first step may take this long; who is killed is noticed at once all the same
LAST_TEST_S = 15.0  # besides four times the longest test so far, how long others wait for who tests the final model


@dataclass(frozen=True)
class ElasticPlan:
    """What every worker is told.

    Attributes:
        changes: what is asked of the workload in place of its own.
        workers: how many the first step waits for.
        folder: the run's.
        place: which of the workers to be it is; a replacement has that of the one it replaces.
        start: the first is 1; one more for each resumption.
        resume: the step of the checkpoint to begin from, the last of an epoch; 0 without one.
        counted_by: "interface" where each worker has a network interface of its own, "exchange" otherwise.
    """

    workload: str
    codec: str
    consistency: str
    seed: int
    changes: Changes
    workers: int
    folder: str
    place: int = 0
    start: int = 1
    resume: int = 0
    counted_by: str = "exchange"


@dataclass(frozen=True)
class StepRow:
    """A step as one of its `members` saw it; `began`, and `at` when it was committed, by the machine's one clock."""

    step: int
    start: int
    view: int
    members: int
    worker: int
    coordinator: bool
    began: float
    at: float
    compute: float
    wait: float
    sent: float
    loss: float
    samples: int


@dataclass(frozen=True)
class EvaluationRow:
    """An evaluation after `step` steps, and how long it and its checkpoint held up the others."""

    step: int
    start: int
    worker: int
    took: float
    loss: float
    accuracy: float | None
    reached: bool


@dataclass(frozen=True)
class WorkerRow:
    """Who has joined: its number, its process, and how long it had read data before."""

    worker: int
    start: int
    place: int
    pid: int
    loading: float


@dataclass(frozen=True)
class WorkerEnded:
    """How a worker's part ended; `finished` with the whole training, else on request."""

    worker: int
    finished: bool
    digest: str


def meeting_of(folder: Path, start: int) -> Path:
    """Where the workers of a start meet."""
    return folder / ("members" if start == 1 else f"members-{start}")


def steps_journal(folder: Path) -> Journal[StepRow]:
    """The steps of a run."""
    return Journal(folder / "steps.jsonl", StepRow)


def evaluations_journal(folder: Path) -> Journal[EvaluationRow]:
    """The evaluations of a run."""
    return Journal(folder / "evaluations.jsonl", EvaluationRow)


def workers_journal(folder: Path) -> Journal[WorkerRow]:
    """The workers of a run."""
    return Journal(folder / "workers.jsonl", WorkerRow)


def run_worker(plan: ElasticPlan) -> WorkerEnded:
    """Train in this process until the training is over, or a stop is asked for."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command that started us takes Ctrl-C
    compute_repeatably()
    return ElasticWorker(plan).run()


class ElasticWorker:
    """The state of one worker."""

    def __init__(self, plan: ElasticPlan) -> None:
        self.plan, self.folder = plan, Path(plan.folder)
        self.workload = plan.changes.of(plan.workload)
        load_software(self.workload)
        begun = time.perf_counter()
        self.task = self.workload.prepare(plan.seed)
        self.loading_s = time.perf_counter() - begun
        self.optimizer = self.task.optimizer(self.task.model.parameters())
        self.steps_per_epoch = self.task.steps_per_epoch()
        self.total_steps = self.workload.epochs * self.steps_per_epoch
        if plan.resume:
            self._restore(plan.resume)
        self._steps, self._evaluations = steps_journal(self.folder), evaluations_journal(self.folder)
        self._metrics: Metrics | None = None
        self._recent: deque[StepRow] = deque(maxlen=20)
        self._block: list[StepRow] = []  # steps that are not committed yet
        self._known_as = 0
        self._shown_at = 0.0
        self._sent_before = 0

    def run(self) -> WorkerEnded:
        """Every step that is left."""
        plan, data = self.plan, len(self.task.data.train)
        epochs = self.workload.epochs - plan.resume // self.steps_per_epoch
        rate = LambdaLR(self.optimizer, self._rate)
        warnings.filterwarnings("ignore", message="the job in .* has finished")  # a late replacement; the command knows
        with elastic(
            self.task.model, self.optimizer, dataset_size=data, batch=self.task.global_batch(1), epochs=epochs,
            seed=_order_seed(plan), meeting=meeting_of(self.folder, plan.start), workers=plan.workers, scheduler=rate,
            patience_s=PATIENCE_S, codec=plan.codec, consistency=plan.consistency,
        ) as job:  # fmt: skip
            with contextlib.suppress(BadInput):  # the training was over before this worker came
                self._introduce(job)
            for numbers in job.batches():
                if control.is_stop_requested(self.folder):
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
        return self.plan.resume + job.steps

    def _rate(self, steps: int) -> float:
        """The schedule's factor after so many committed steps of this start; as `Task.begin_step` has it."""
        epoch, step = divmod(min(self.plan.resume + steps, self.total_steps - 1), self.steps_per_epoch)
        return self.workload.plan((epoch + step / self.steps_per_epoch) / self.workload.epochs)

    def _introduce(self, job: ElasticJob) -> None:
        """Leave a note of who this is, once under each number."""
        if job.worker == self._known_as:
            return
        self._known_as = job.worker
        row = WorkerRow(job.worker, self.plan.start, self.plan.place, os.getpid(), self.loading_s)
        workers_journal(self.folder).add(row)
        self._sent_before = self._sent_nbytes()

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
        sent, before = 0.0, self._sent_before
        if self.plan.counted_by == "interface":
            self._sent_before = self._sent_nbytes()
            sent = float(self._sent_before - before)
        self._block.append(StepRow(
            made + 1, self.plan.start, view, len(members), worker, members[0] == worker, began, time.monotonic(),
            computed - began, 0.0, sent, float(loss.detach()), len(numbers),
        ))  # fmt: skip
        if job.steps > committed:
            self._write(job)

    def _write(self, job: ElasticJob) -> None:
        """The rows of steps that are committed now."""
        told = {self.plan.resume + each.step + 1: each for each in job.records[-2 * len(self._block) :]}
        for row in self._block:
            own = told[row.step]
            sent = row.sent if self.plan.counted_by == "interface" else float(own.sent_nbytes)
            self._recent.append(replace(row, wait=own.wait_s, sent=sent))
            self._steps.add(self._recent[-1])
        self._block.clear()
        if self._recent[-1].coordinator:
            self._show(self._recent[-1])

    def _sent_nbytes(self) -> int:
        return interface_nbytes() if self.plan.counted_by == "interface" else 0

    def _evaluate_if_due(self, job: ElasticJob) -> None:
        """The coordinator tests the model at an epoch's end; the others wait for it, with the clock at rest.

        One that takes over from a coordinator that died while testing tests anew.
        """
        made = self._made(job)
        due = made > self.plan.resume and made % self.steps_per_epoch == 0
        if due and job.members[0] == job.worker and not self._is_tested(made):
            with job.busy():
                self._evaluate(made, job.worker)

    def _evaluate_last(self, worker: int) -> None:
        """One of those who hold the final model tests it: who locks the journal of evaluations.

        If it dies over that, the next one does; if it is stopped, the others do without the lock after a while.
        """
        longest_s = max((row.took for row in self._evaluations.read()), default=0.0)
        until = time.monotonic() + LAST_TEST_S + 4 * longest_s
        with open(self._evaluations.path, "ab") as journal:
            while not self._is_tested(self.total_steps):
                free = time.monotonic() > until or _is_locked_by_us(journal)
                if free and not self._is_tested(self.total_steps):  # or the lock was let go of in between
                    return self._evaluate(self.total_steps, worker)
                time.sleep(0.05)

    def _is_tested(self, made: int) -> bool:
        return any((row.start, row.step) == (self.plan.start, made) for row in self._evaluations.read())

    def _evaluate(self, made: int, worker: int) -> None:
        begun = time.monotonic()
        scores = self.task.evaluate(self.task.model)
        loss, accuracy, reached = scores["loss"], scores.get("accuracy"), self.task.reached(scores)
        state = {"model": self.task.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        CheckpointFiles(self.folder / "checkpoints").write(made, state)
        took = time.monotonic() - begun
        self._evaluations.add(EvaluationRow(made, self.plan.start, worker, took, loss, accuracy, reached))
        if self._recent:
            self._show(self._recent[-1], test_accuracy=accuracy, test_loss=loss)

    def _restore(self, step: int) -> None:
        kept: dict[str, Any] = CheckpointFiles(self.folder / "checkpoints").read(step)
        self.task.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.workload.learning_rate

    def _show(self, row: StepRow, **scores: float | None) -> None:
        """A line of metrics from the coordinator: at evaluations, and otherwise a few a second."""
        now = time.monotonic()
        if not scores and now - self._shown_at < SHOWN_EVERY_S:
            return
        self._shown_at = now
        if self._metrics is None:
            self._metrics = Metrics(self.folder)
        recent_s = max(1e-9, sum(each.at - each.began for each in self._recent))
        samples = len(self.task.data.train) / self.steps_per_epoch * len(self._recent)
        sent_Bps = sum(each.sent for each in self._recent) / recent_s
        self._metrics.add(
            trial=0, step=row.step, train_loss=row.loss, samples_per_s=samples / recent_s, sent_Bps=sent_Bps, **scores
        )


def _is_locked_by_us(file: IO[bytes]) -> bool:
    """Lock a file unless another process has; whoever closes it or dies lets go of it."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _order_seed(plan: ElasticPlan) -> int:
    """Of the order of the data: another one after a resumption, which begins with the ledger's first epoch again."""
    return plan.seed + 1_000_003 * plan.resume
