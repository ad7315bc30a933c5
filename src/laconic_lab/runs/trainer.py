"""One rank's training of one trial: by a configuration, from a seed, with its clock, its bytes and its checkpoints.

Callers: `train` and `compare`, on every rank through `workers.py`. Invariant: the weights depend on workload,
configuration, workers and seed alone: a run that is killed and resumed, at any step, ends with the same bits as one
that is not (unless codec "auto" decides by what it measures).

The clock: it starts when every rank is ready (imports done, connections open, kernels compiled on random gradients),
before the data is read, and stands still during evaluations and checkpoints.
"""

from __future__ import annotations

import hashlib
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from laconic.consistency import build as build_mode
from laconic.exchange.collectives import all_gather, barrier
from laconic.storage.checkpoints import CheckpointFiles
from laconic.storage.tree import read_file
from laconic.transports.world import World
from laconic.workloads import Workload
from laconic_lab.records.record import Clock, TrialRecord
from laconic_lab.runs.monitor import Monitor, SentCounter
from laconic_lab.runs.spec import PIPELINE, PreparedRun, TrialSpec
from laconic_lab.runs.stopping import Stopping, request_stop
from laconic_lab.runs.strategies import make_trainee
from laconic_lab.runs.timeline import StepTimeline
from laconic_lab.runs.trainee import Times, Trainee
from laconic_lab.runs.trial import Evaluation, Figures, StepFigures, TrialOutcome, assemble

CLOCK = Clock(
    starts="when every worker is ready and kernels are compiled, before the data is read",
    includes_data_loading=True,
    includes_evaluation=False,
    across_ranks="the slowest rank's, from the end of a step to that of the next",
)
WARM_UP_STEPS = 2
QUEUED = Path("/proc/thread-self/schedstat")  # nanoseconds on a core, nanoseconds in the queue for one, turns


@dataclass(frozen=True)
class Ended:
    """How a rank's training ended; only rank 0 has the trial, and only when it came to its end."""

    step: int
    trial: TrialRecord | None = None


class Scored(NamedTuple):
    """An evaluation before the last, as it is reported while the training goes on."""

    step: int
    seconds: float
    accuracy: float | None
    loss: float


Report = Callable[[Scored], bool]  # answers whether the training is to stop


class RankTraining(ABC):
    """The state of one rank's training; how ranks divide the steps is a subclass's.

    Args:
        report: told of every evaluation but the last, on rank 0.
    """

    def __init__(self, trial: TrialSpec, world: World, report: Report | None = None) -> None:
        self.trial, self.world, self.report = trial, world, report
        workload = trial.changes.of(trial.workload)
        self.folder = Path(trial.folder) if trial.folder is not None else None
        self._warm_up(workload)
        barrier(group=world)
        self.prepared = PreparedRun(trial, workload)
        self.loading_s = self.prepared.loading_s
        if trial.begin is not None:
            begin_with(self.prepared.task.model, read_file(Path(trial.begin)))
        self.trainee = self._trainee(workload, self.prepared.task.model)
        self.timeline = StepTimeline(self.trainee)
        shown = self.folder if world.rank == 0 else None
        self.monitor = Monitor(shown, trial.order, self.prepared.samples_per_step)
        self.sent = SentCounter(trial.counted_by)
        self.step = 0
        self.rows: list[StepFigures] = []
        self.evaluations: list[Evaluation] = []

    @abstractmethod
    def run(self) -> Ended:
        """Every step that is left."""

    @abstractmethod
    def figures(self) -> Figures:
        """What every rank measured at every step; called by all."""

    def _trainee(self, workload: Workload, model: nn.Module) -> Trainee:
        optimizer = workload.optimizer(model.parameters(), workload.learning_rate)
        return make_trainee(self.trial.configuration, model, optimizer, self.world)

    def _warm_up(self, workload: Workload) -> None:
        """Compile kernels and open connections by exchanging random gradients of a throw-away model."""
        if self.trial.configuration.kind == "single" or self.trial.configuration.algorithm == PIPELINE:
            return  # a pipeline has no gradients without data
        model = workload.build(self.trial.seed)
        model.forward = partial(_random_loss, model)
        spare = self._trainee(workload, model)
        for _ in range(WARM_UP_STEPS):
            spare.optimizer.zero_grad()
            spare.model().backward()
            spare.optimizer.step()
        spare.finish()  # nobody closes a server that another still speaks to
        spare.close()

    def take_step(self, epoch: int, step: int, share: int) -> None:
        """Train with one share of a step, and keep its figures."""
        task, trainee, place = self.prepared.task, self.trainee, (share, self.world.world_size)
        slow = self.trial.slow if self.world.rank == self.world.world_size - 1 else 1.0
        computed = computed_s() if slow > 1 else 0.0
        begun = time.perf_counter()
        task.begin_step(trainee.optimizer, epoch, step, *place)
        batch = task.batch(epoch, step, *trainee.part(*place))
        trainee.optimizer.zero_grad()
        forward, loss = trainee.train_on(task, batch)
        if slow > 1:
            time.sleep((slow - 1) * (computed_s() - computed))
        backward = time.perf_counter()
        trainee.optimizer.step()
        ended = time.perf_counter()
        times = Times(begun, forward, backward, ended)
        self.timeline.note(times)
        parts = trainee.parts(times)
        if self.sent.is_used:
            parts = parts._replace(sent=self.sent.taken())
        self.rows.append(StepFigures(ended - begun, *parts, loss=loss))
        self.monitor.note(self.rows[-1])

    def finish(self) -> None:
        """Let all workers agree on the model that was trained."""
        self.charge(self.trainee.finish)

    def charge(self, work: Callable[[], None]) -> None:
        """Charge the block's time and bytes to the last step, if there was one."""
        begun = time.perf_counter()
        work()
        if self.rows:
            last, sent = self.rows[-1], self.sent.taken() if self.sent.is_used else 0.0
            self.rows[-1] = last._replace(seconds=last.seconds + time.perf_counter() - begun, sent=last.sent + sent)

    def evaluate(self) -> None:
        """Test the model on rank 0; the others wait for it, with the clock at rest."""
        self.trainee.settle()
        if self.world.rank != 0:
            return
        task = self.prepared.task
        scores = task.evaluate(self.trainee.module)
        loss, accuracy = scores["loss"], scores.get("accuracy")
        self.evaluations.append(Evaluation(self.step, self.loading_s, accuracy, loss, task.reached(scores)))
        self.show(test_accuracy=accuracy, test_loss=loss)
        if self.report is None or self.folder is None or self.step == self.prepared.total_steps:
            return
        if self.report(Scored(self.step, self._seconds, accuracy, loss)):
            request_stop(self.folder)

    @property
    def _seconds(self) -> float:
        """The training's seconds so far."""
        return self.loading_s + sum(row.seconds for row in self.rows)

    def show(self, **scores: float | None) -> None:
        """Write a line of metrics: with test scores at once, otherwise a few a second."""
        if not scores and not self.monitor.is_due():
            return
        self.monitor.show(self.step, seconds=self._seconds, **scores)

    def ended(self) -> Ended:
        """The end of a whole training: what all ranks measured, as one trial, on rank 0."""
        figures, world = self.figures(), self.world
        scalars = all_gather(torch.tensor([self.loading_s, *self._staleness()]).double(), group=world)
        digest = weights_digest(self.trainee.module)
        digests = all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), group=world)
        if world.rank != 0:
            return Ended(self.step)
        counted = self.trainee.counts or self.sent.is_used
        sent = float(figures.column("sent").mean()) if counted else None
        outcome = TrialOutcome(
            loading_s=float(scalars[:, 0].max()),
            evaluations=self.evaluations,
            samples_at=self.prepared.samples_at,
            parameters=sum(p.numel() for p in self.trainee.module.parameters()),
            layers=self.trainee.layers(sent),
            weights_sha256=digest.hex(),
            replicas_identical=bool((digests == digests[0]).all()) if world.world_size > 1 else None,
            counted=counted,
            timeline=self.trainee.spans() or self.timeline.spans(),
            staleness=None if scalars[:, 1].isnan().any() else (float(scalars[:, 1].mean()), int(scalars[:, 2].max())),
            noise=self.trainee.noise(),
        )
        return Ended(self.step, assemble(self.trial.configuration, self.trial.seed, self.trial.order, figures, outcome))

    def _staleness(self) -> tuple[float, float]:
        """Mean and most of this rank's steps; NaN where the mode does not measure it."""
        found = self.trainee.staleness()
        return (sum(found) / len(found), float(max(found))) if found else (math.nan, math.nan)


class LockstepTraining(RankTraining):
    """All ranks take every step together; with checkpoints where the trial keeps them."""

    def run(self) -> Ended:
        """Every step that is left, with an evaluation at each epoch's end."""
        ends = set(self.prepared.ends)
        stopping = self._stopping() if self.trial.keeps and self.folder is not None else None
        if self.trial.resume:
            self._restore(self.trial.resume)
        saved = self.step
        barrier(group=self.world)
        self.sent.restart()
        while self.step < self.prepared.total_steps:
            order = stopping.order(self.step) if stopping is not None else None
            if stopping is not None and order is not None and saved != self.step:
                saved = self._save(stopping)
                self.sent.restart()
            if order == "stop":
                return Ended(self.step)
            self.take_step(*self.prepared.place(self.step), self.world.rank)
            self.step += 1
            if self.step == self.prepared.total_steps:
                self.finish()
            elif self.step in ends:
                self.charge(self.trainee.catch_up)
            if self.step in ends:
                self.evaluate()
                if stopping is not None:
                    saved = self._save(stopping)
                barrier(group=self.world)  # nobody's next step contains another's evaluation
                self.sent.restart()
            else:
                self.show()
        return self.ended()

    def _stopping(self) -> Stopping:
        assert self.folder is not None
        chosen = self.trial.configuration
        lead = build_mode(chosen.consistency).lead if chosen.kind == "distribute" else 1
        return Stopping(self.folder, self.world.rank, lead=lead, ends=self.prepared.ends)

    @property
    def _checkpoints(self) -> CheckpointFiles:
        assert self.folder is not None
        return CheckpointFiles(self.folder / "checkpoints", self.world.rank)

    def figures(self) -> Figures:
        rows = torch.tensor(self.rows, dtype=torch.float64)
        return Figures(all_gather(rows, group=self.world).numpy())

    def _save(self, stopping: Stopping) -> int:
        self.trainee.settle()
        self._checkpoints.write(self.step, {
            "step": self.step, "model": self.trainee.module.state_dict(), "exchange": self.trainee.state_dict(),
            "optimizer": self.trainee.optimizer.state_dict(), "random": torch.get_rng_state(),
            "rows": torch.tensor(self.rows, dtype=torch.float64).reshape(-1, len(StepFigures._fields)),
            "evaluations": [tuple(each) for each in self.evaluations], "loading_s": self.loading_s,
        })  # fmt: skip
        stopping.saved()
        return self.step

    def _restore(self, step: int) -> None:
        parts = ("model", "optimizer", "exchange", "random", "step", "rows", "evaluations", "loading_s")
        kept: dict[str, Any] = self._checkpoints.read(step, *parts)
        self.trainee.module.load_state_dict(kept["model"])
        self.trainee.optimizer.load_state_dict(kept["optimizer"])
        self.trainee.load_state_dict(kept["exchange"])
        torch.set_rng_state(kept["random"])
        self.step, self.rows = kept["step"], [StepFigures(*row) for row in kept["rows"].tolist()]
        self.evaluations = [Evaluation(*each) for each in kept["evaluations"]]
        self.loading_s += kept["loading_s"]  # reading the data again is part of what the training took


def begin_with(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Copy the weights whose names and shapes match the model's; leave the others unchanged."""
    own = model.state_dict()
    fitting = {name: value for name, value in weights.items() if name in own and own[name].shape == value.shape}
    model.load_state_dict({**own, **fitting})


def _random_loss(model: nn.Module) -> Tensor:
    """A loss without data, whose gradients are random."""
    return torch.stack([(p * torch.randn_like(p)).sum() for p in model.parameters()]).sum()


def computed_s() -> float:
    """Seconds that this thread has spent on a core or queued for one: none in which it waited for another worker."""
    try:
        queued_ns = int(QUEUED.read_text().split()[1])
    except (OSError, IndexError):  # not on this system: time in the queue is then left out
        queued_ns = 0
    return time.thread_time() + 1e-9 * queued_ns


def weights_digest(model: nn.Module) -> bytes:
    """SHA-256 of the parameters' names and bits, in order."""
    digest = hashlib.sha256()
    for name, parameter in model.named_parameters():
        values: Tensor = parameter.detach().contiguous().reshape(-1)
        digest.update(name.encode() + b"\0" + values.view(torch.uint8).numpy().tobytes())
    return digest.digest()


def compute_repeatably() -> None:
    """One thread, and the same bits every time."""
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
