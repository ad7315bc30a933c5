"""One worker of an elastic training: the workload's task, trained through `laconic.elastic`.

Callers: `driver.py` starts as many as were asked for, and another for each that dies. All meet in the run's folder,
where everything that has to outlive a worker is written too: the journals; in checkpoints/, model, optimiser and the
mode's state at the end of the last two epochs; in residuals/, each worker's residuals then. Invariant: if a file cannot
be written, a worker warns and trains on.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import time
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

import torch
from torch.optim.lr_scheduler import LambdaLR

from laconic.consistency.elastic.coded import merged
from laconic.consistency.elastic.door import elastic
from laconic.consistency.elastic.job import ElasticJob
from laconic.consistency.elastic.messages import MAX_MEMBERS
from laconic.consistency.elastic.options import Samples
from laconic.consistency.elastic.outage import RETRY_S, Outage
from laconic.errors import BadInput, PayloadError, StorageError
from laconic.storage.checkpoints import CheckpointFiles
from laconic.storage.tree import read_file
from laconic.workloads.batch_schedules import CONSTANT
from laconic.workloads.description import Description
from laconic_lab.runs import stopping
from laconic_lab.runs.elastic.journals import EvaluationRow, Journals, StepRow, WorkerRow
from laconic_lab.runs.monitor import Monitor, SentCounter
from laconic_lab.runs.spec import PreparedRun, TrialSpec
from laconic_lab.runs.trainer import compute_repeatably, weights_digest
from laconic_lab.runs.trial import StepFigures

PATIENCE_S = 30.0  # a first step may take this long; who is killed is noticed at once all the same
LAST_CHECKPOINT_S = 60.0  # how long a folder that cannot be written to is waited for at the end
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
        BadInput: too many workers, or a batch that grows.
    """
    if workload.batch_schedule != str(CONSTANT):
        raise BadInput(f"--elastic keeps the batch as it is: it takes no --batch-schedule {workload.batch_schedule}")
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
        self._residuals = CheckpointFiles(self.folder / "residuals", trial.index)
        self._held: dict[str, torch.Tensor] = {}  # what the mode kept, at a resumption
        self.workload = trial.changes.of(trial.workload)
        self.prepared = PreparedRun(trial, self.workload)
        self.task, self.steps_per_epoch = self.prepared.task, self.prepared.task.steps_per_epoch()
        self.optimizer = self.task.optimizer(self.task.model.parameters())
        if trial.resume:
            self._restore(trial.resume)
        self._monitor = Monitor(self.folder, trial.order, self.prepared.samples_per_step)
        self._sent = SentCounter(trial.counted_by)
        self._block: list[StepRow] = []  # steps that are not committed yet
        self._known_as = self._kept_at = 0

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
            algorithm="auto" if chosen.algorithm == "coordinator" else chosen.algorithm,
        ) as job:  # fmt: skip
            if trial.resume and job.is_first:
                self._go_on(job)
            self._introduce(job)
            for numbers in job.batches():
                if stopping.is_stop_requested(self.folder):
                    return WorkerEnded(job.worker, False, "")
                self._introduce(job)
                self._keep_if_due(job)
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
        """Record this worker in the journal, once per number; if that fails, retry before the next step."""
        if job.worker == self._known_as:
            return
        row = WorkerRow(job.worker, self.trial.start, self.trial.index, os.getpid(), self.prepared.loading_s)
        with _going_on():
            self.journals.workers.add(row)
            self._known_as = job.worker
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
        loss.backward()
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
            with _going_on():
                self.journals.steps.add(row)
            self._monitor.note(StepFigures(row.at - row.began, row.compute, 0.0, row.wait, 0.0, row.sent, row.loss))
        last = self._block[-1]
        self._block.clear()
        if last.coordinator and self._monitor.is_due():
            with _going_on():
                self._monitor.show(last.step)

    def _keep_if_due(self, job: ElasticJob) -> None:
        """At the end of an epoch save this worker's residuals; the coordinator also tests the model and saves it.

        The other workers wait meanwhile, and the clock stands still. If the coordinator dies while it tests, its
        successor tests again.
        """
        made = self._made(job)
        if self._block or made == self.trial.resume or made % self.steps_per_epoch:
            return
        state = job.state_dict()
        if state["residuals"] and made != self._kept_at:
            self._kept_at = made
            with _going_on():
                self._residuals.write(made, state["residuals"])
        if job.members[0] == job.worker and not self._is_tested(made):
            with job.busy():
                held = {name: kept for name, kept in state["extra"].items() if isinstance(kept, torch.Tensor)}
                self._evaluate(made, job.worker, held)

    def _evaluate_last(self, worker: int) -> None:
        """Test the final model on one of the workers that hold it: the first to lock the journal of evaluations.

        If that worker dies, the kernel frees the lock and the next one tests. If it hangs, the others stop waiting for
        the lock after a while.
        """
        longest_s = max((row.took for row in self.journals.evaluations.read()), default=0.0)
        until = time.monotonic() + LAST_TEST_S + 4 * longest_s
        try:
            journal = open(self.journals.evaluations.path, "ab")  # noqa: SIM115  (closed below)
        except OSError:  # nobody can lock it, so that each tests
            return self._evaluate(self.prepared.total_steps, worker, {})
        with journal:
            while not self._is_tested(self.prepared.total_steps):
                free = time.monotonic() > until or _is_locked_by_us(journal)
                if free and not self._is_tested(self.prepared.total_steps):  # or the lock was let go of in between
                    return self._evaluate(self.prepared.total_steps, worker, {})
                time.sleep(0.05)

    def _is_tested(self, made: int) -> bool:
        return any((row.start, row.step) == (self.trial.start, made) for row in self.journals.evaluations.read())

    def _evaluate(self, made: int, worker: int, held: dict[str, torch.Tensor]) -> None:
        begun = time.monotonic()
        scores = self.task.evaluate(self.task.model)
        loss, accuracy, reached = scores["loss"], scores.get("accuracy"), self.task.reached(scores)
        state = {"model": self.task.model.state_dict(), "optimizer": self.optimizer.state_dict(), "held": held}
        with _going_on():
            self._save(made, state)
        took = time.monotonic() - begun
        with _going_on():
            self.journals.evaluations.add(EvaluationRow(made, self.trial.start, worker, took, loss, accuracy, reached))
            self._monitor.show(made, test_accuracy=accuracy, test_loss=loss)

    def _save(self, made: int, state: dict[str, Any]) -> None:
        """Write a checkpoint; retry the last one for a while, because the model exists nowhere else."""
        outage = Outage("the last checkpoint", LAST_CHECKPOINT_S, "the trained model ends with its workers")
        while True:
            try:
                return self.checkpoints.write(made, state)
            except StorageError as error:
                if made < self.prepared.total_steps:
                    raise
                outage.failed(error)
                time.sleep(RETRY_S)

    def _restore(self, step: int) -> None:
        kept: dict[str, Any] = self.checkpoints.read(step, "model", "optimizer", "held")
        self.task.model.load_state_dict(kept["model"])
        self.optimizer.load_state_dict(kept["optimizer"])
        for group in self.optimizer.param_groups:
            group["lr"] = group["initial_lr"] = self.workload.learning_rate
        self._held = kept["held"]

    def _go_on(self, job: ElasticJob) -> None:
        """As the first worker of a resumption, load the mode's state and all workers' residuals."""
        kept: list[dict[str, torch.Tensor]] = []
        for path in sorted(self._residuals.folder.glob(f"step{self.trial.resume:09d}-*")):
            with contextlib.suppress(PayloadError):  # cut off: lost, as with a worker that is lost
                kept.append(read_file(path))
        state = job.state_dict()
        state["extra"] |= self._held
        state["residuals"] = merged(kept, summed=not self.trial.configuration.consistency.startswith("robust"))
        job.load_state_dict(state)


@contextlib.contextmanager
def _going_on() -> Iterator[None]:
    """If a file cannot be written in the block, warn and go on: the model is in memory."""
    try:
        yield
    except StorageError as error:
        warnings.warn(f"{error}; the training goes on", stacklevel=3)


def _is_locked_by_us(file: IO[bytes]) -> bool:
    """Lock a file unless another process has; the lock ends when the file is closed or the process dies."""
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def _order_seed(trial: TrialSpec) -> int:
    """Of the order of the data: another one after a resumption, which begins with the ledger's first epoch again."""
    return trial.seed + 1_000_003 * trial.resume
