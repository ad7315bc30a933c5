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
import signal
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.consistency import build as consistency_mode
from laconic.errors import BadInput
from laconic.exchange.auto import GUESS
from laconic.exchange.collectives import all_gather, barrier
from laconic.lab.clusters.cluster import INTERFACE
from laconic.lab.runs.configurations import Trainee, layers_of, make_trainee
from laconic.lab.runs.control import Control, request_stop
from laconic.lab.records.metrics import Metrics
from laconic.lab.records.record import Clock, Configuration, Trial
from laconic.lab.runs.trial import COLUMNS, Evaluation, Figures, assemble
from laconic.storage.checkpoints import CheckpointFiles
from laconic.transports.profile import Profile
from laconic.transports.world import World, init
from laconic.workloads import AS_DECLARED, Changes, Task, Workload

CLOCK = Clock(
    starts="when every worker is ready, before the data is read",
    includes_data_loading=True,
    includes_evaluation=False,
    across_ranks="the slowest rank's, per step",
)
TIMEOUT_S = 1800.0  # how long ranks may wait for one that evaluates; a dead one is noticed at once all the same
WARM_UP_STEPS = 2
SHOWN_EVERY_S = 0.2  # how often rank 0 writes a line of metrics


@dataclass(frozen=True)
class Plan:
    """What every rank is told.

    Attributes:
        workload: its spec.
        changes: what is asked in place of its own.
        order: the trial's position in the run.
        folder: the run's, for metrics, requests and checkpoints; None for no file at all.
        keeps: whether checkpoints are written.
        resume: the step to go on from.
        link_bps: the emulated links' rate, for choosing between exchanges of one round and of two; None if unlimited.
        counted_by: "interface" where each rank has a network interface of its own, "exchange" otherwise.
        launched: started by torchrun or mpiexec, whose signals reach the ranks themselves.
        slow: the last rank computes this many times as long, by sleeping; 1 does not.
    """

    workload: str
    configuration: Configuration
    seed: int
    changes: Changes = AS_DECLARED
    order: int = 0
    folder: str | None = None
    keeps: bool = False
    resume: int | None = None
    link_bps: float | None = None
    counted_by: str = "exchange"
    launched: bool = False
    slow: float = 1.0


@dataclass(frozen=True)
class Ended:
    """How a rank's training ended; only rank 0 has the trial, and only when it came to its end."""

    step: int
    trial: Trial | None = None


def run_rank(plan: Plan) -> Ended:
    """Train on this rank, from the beginning or a checkpoint, to the end or to a request to stop."""
    _listen(plan)
    compute_repeatably()
    own_group = plan.configuration.kind == "peer" and not dist.is_initialized()
    if own_group:
        dist.init_process_group("gloo")
    try:
        with init(timeout_s=TIMEOUT_S) as world:
            if world.world_size != plan.configuration.workers:
                raise BadInput(f"the run has {plan.configuration.workers} workers, this job {world.world_size}")
            world.profile = _known_link(plan, world)
            return _training(plan)(plan, world).run()
    finally:
        if own_group:
            dist.destroy_process_group()


def _training(plan: Plan) -> type[Training]:
    """Workers that need not keep step run freely in a comparison; a training keeps step, for its checkpoints' sake."""
    from laconic.lab.runs.free_training import FreeTraining

    chosen = plan.configuration
    alone = plan.keeps or plan.folder is None  # the budget lies in the run's folder
    free = chosen.kind == "laconic" and not alone and not consistency_mode(chosen.consistency).lockstep
    return FreeTraining if free and chosen.workers > 1 else Training


class Training:
    """The state of one rank's training."""

    def __init__(self, plan: Plan, world: World) -> None:
        self.plan, self.world = plan, world
        self.workload = plan.changes.of(plan.workload)
        self.folder = Path(plan.folder) if plan.folder is not None else None
        load_software(self.workload)
        self._warm_up()
        barrier(group=world)
        begun = time.perf_counter()
        self.task: Task = self.workload.prepare(plan.seed)
        self.loading_s = time.perf_counter() - begun
        self.trainee = self._trainee(self.task.model)
        self.steps_per_epoch = self.task.steps_per_epoch(world.world_size)
        self.total_steps = self.workload.epochs * self.steps_per_epoch
        self.step = 0
        self.rows: list[list[float]] = []
        self.evaluations: list[Evaluation] = []
        self._shown_s = 0.0

    def _trainee(self, model: nn.Module) -> Trainee:
        optimizer = self.workload.optimizer(model.parameters(), self.workload.learning_rate)
        return make_trainee(self.plan.configuration, model, optimizer, self.world)

    def _warm_up(self) -> None:
        """Exchange random gradients of a model that is thrown away: kernels are compiled, connections opened."""
        if self.plan.configuration.kind != "laconic":
            return
        spare = self._trainee(self.workload.build(self.plan.seed))
        for _ in range(WARM_UP_STEPS):
            for parameter in spare.module.parameters():
                parameter.grad = torch.randn_like(parameter)
            spare.optimizer.step()
        if spare.agreement is not None:
            spare.agreement.finish()  # nobody closes a server that another still speaks to
        spare.close()

    def run(self) -> Ended:
        """Every step that is left, with an evaluation at each epoch's end."""
        control = Control(self.folder, self.world.rank) if self.plan.keeps and self.folder is not None else None
        if self.plan.resume is not None:
            self._restore(self.plan.resume)
        metrics = Metrics(self.folder) if self.folder is not None and self.world.rank == 0 else None
        saved = self.step
        barrier(group=self.world)
        self._sent_before = self._interface_nbytes()
        while self.step < self.total_steps:
            order = control.order(self.step) if control is not None else None
            if control is not None and order is not None and saved != self.step:
                saved = self._save(control)
            if order == "stop":
                return Ended(self.step)
            self.rows.append(self._one_step(*divmod(self.step, self.steps_per_epoch)))
            self.step += 1
            if self.step == self.total_steps:
                self._finish()
            if self.step % self.steps_per_epoch == 0:
                self._evaluate(metrics)
                if control is not None:
                    saved = self._save(control)
                barrier(group=self.world)  # nobody's next step contains another's evaluation
            elif metrics is not None:
                self._show(metrics)
        return Ended(self.step, self._trial())

    def _finish(self) -> None:
        """Let all workers agree on the model that was trained; it is part of the last step."""
        begun = time.perf_counter()
        if self.trainee.agreement is not None:
            self.trainee.agreement.finish()
        self.rows[-1][0] += time.perf_counter() - begun

    def _one_step(self, epoch: int, step: int, share: int | None = None) -> list[float]:
        """Train one step, with this rank's share of it or another; its figures in the order of COLUMNS."""
        share = self.world.rank if share is None else share
        task, trainee, place = self.task, self.trainee, (share, self.world.world_size)
        begun = time.perf_counter()
        task.begin_step(trainee.optimizer, epoch, step, *place)
        batch = task.batch(epoch, step, *place)
        trainee.optimizer.zero_grad()
        loss = task.loss(trainee.model, batch)
        forward = time.perf_counter()
        loss.backward()  # type: ignore[no-untyped-call]
        if self.plan.slow > 1 and self.world.rank == self.world.world_size - 1:
            time.sleep((self.plan.slow - 1) * (time.perf_counter() - begun))
        backward = time.perf_counter()
        trainee.optimizer.step()
        ended = time.perf_counter()
        encode = wait = decode = sent = 0.0
        if trainee.state is None and trainee.agreement is not None:
            compute, last = backward - begun, trainee.agreement.records[-1]
            wait, sent = last.wait_s, float(last.sent_nbytes)
        elif trainee.state is None:
            # DDP's backward computes and communicates at once: what it takes cannot be told apart, and is left over
            compute = ended - begun
            if self.plan.configuration.kind == "peer":
                compute -= backward - forward
        else:
            compute = backward - begun
            for record in trainee.state.records:
                encode, wait, decode = encode + record.encode_s, wait + record.wait_s, decode + record.decode_s
                sent += record.sent_nbytes
            trainee.state.records.clear()
        if self.plan.counted_by == "interface":
            now = self._interface_nbytes()
            sent, self._sent_before = float(now - self._sent_before), now
        return [ended - begun, compute, encode, wait, decode, sent, float(loss.detach())]

    def _interface_nbytes(self) -> int:
        return interface_nbytes() if self.plan.counted_by == "interface" else 0

    def _evaluate(self, metrics: Metrics | None) -> None:
        """Rank 0 tests the model; the others wait for it, with the clock at rest."""
        if self.world.rank != 0:
            return
        scores = self.task.evaluate(self.trainee.module)
        loss, accuracy = scores["loss"], scores.get("accuracy")
        self.evaluations.append(Evaluation(self.step, self.loading_s, accuracy, loss, self.task.reached(scores)))
        if metrics is not None:
            self._show(metrics, test_accuracy=accuracy, test_loss=loss)

    def _show(self, metrics: Metrics, **scores: float | None) -> None:
        """A line of metrics: at evaluations, and otherwise a few a second."""
        now = time.perf_counter()
        if not scores and now - self._shown_s < SHOWN_EVERY_S:
            return
        self._shown_s = now
        seconds = self.loading_s + sum(row[0] for row in self.rows)
        recent = self.rows[-20:]
        recent_s = sum(row[0] for row in recent)
        samples = len(self.task.data.train) / self.steps_per_epoch
        metrics.add(
            trial=self.plan.order, step=self.step, seconds=seconds, train_loss=recent[-1][6],
            samples_per_s=samples * len(recent) / recent_s, sent_Bps=sum(row[5] for row in recent) / recent_s, **scores,
        )  # fmt: skip

    def _files(self) -> CheckpointFiles:
        assert self.folder is not None
        return CheckpointFiles(self.folder / "checkpoints", self.world.rank)

    def _save(self, control: Control) -> int:
        self._files().write(self.step, {
            "step": self.step, "model": self.trainee.module.state_dict(),
            "optimizer": self.trainee.optimizer.state_dict(), "random": torch.get_rng_state(),
            "rows": torch.tensor(self.rows, dtype=torch.float64).reshape(-1, len(COLUMNS)),
            "evaluations": [each.as_tuple() for each in self.evaluations], "loading_s": self.loading_s,
        })  # fmt: skip
        control.saved()
        return self.step

    def _restore(self, step: int) -> None:
        kept: dict[str, Any] = self._files().read(step)
        self.trainee.module.load_state_dict(kept["model"])
        self.trainee.optimizer.load_state_dict(kept["optimizer"])
        torch.set_rng_state(kept["random"])
        self.step, self.rows = kept["step"], kept["rows"].tolist()
        self.evaluations = [Evaluation(*each) for each in kept["evaluations"]]
        self.loading_s += kept["loading_s"]  # reading the data again is part of what the training took

    def _trial(self) -> Trial | None:
        """What all ranks measured, as one trial; on rank 0."""
        figures = self._figures()
        scalars = all_gather(torch.tensor([self.loading_s, *self._staleness()]).double(), group=self.world)
        digest = weights_digest(self.trainee.module)
        digests = all_gather(torch.frombuffer(bytearray(digest), dtype=torch.uint8), group=self.world)
        if self.world.rank != 0:
            return None
        size = self.world.world_size
        formula = self.plan.configuration.kind == "peer" and self.plan.counted_by == "exchange"
        counted = None if formula else float(figures[:, :, COLUMNS.index("sent")].mean())
        layers = layers_of(self.plan.configuration, self.trainee, counted, size) if size > 1 else []
        return assemble(
            self.plan.configuration, self.plan.seed, self.plan.order, figures, float(scalars[:, 0].max()),
            evaluations=self.evaluations, layers=layers, world_size=size,
            samples_per_step=len(self.task.data.train) / self.steps_per_epoch,
            sent_by_formula=sum(layer.sent_nbytes for layer in layers) if formula else None,
            parameters=sum(p.numel() for p in self.trainee.module.parameters()),
            weights_sha256=digest.hex(), replicas_identical=bool((digests == digests[0]).all()) if size > 1 else None,
            staleness=None if scalars[:, 1].isnan().any() else (float(scalars[:, 1].mean()), int(scalars[:, 2].max())),
        )  # fmt: skip

    def _figures(self) -> Figures:
        """What every rank measured at every step."""
        rows = torch.tensor(self.rows, dtype=torch.float64)
        return all_gather(rows, group=self.world).numpy()

    def _staleness(self) -> tuple[float, float]:
        """Mean and most of this rank's steps; NaN where the mode does not measure it."""
        records = self.trainee.agreement.records if self.trainee.agreement is not None else []
        found = [record.staleness for record in records if record.staleness is not None]
        return (sum(found) / len(found), float(max(found))) if found else (math.nan, math.nan)


def _known_link(plan: Plan, world: World) -> Profile | None:
    """What is known of the link without measuring: a measurement could choose otherwise next time, with other bits.

    Codec "auto" measures for itself.
    """
    if plan.link_bps is None or plan.configuration.codec == "auto":
        return None
    return Profile(world.engine, world.world_size, replace(GUESS, s_per_byte=8 / plan.link_bps))


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


def interface_nbytes() -> int:
    """What this rank's network interface has sent so far, as the kernel counts it, headers included.

    Raises:
        BadInput: it has none of its own.
    """
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        name, _, counters = line.partition(":")
        if name.strip() == INTERFACE:
            return int(counters.split()[8])
    raise BadInput(f"there is no interface {INTERFACE}: this rank is not on an emulated host")


def load_software(workload: Workload) -> None:
    """Import what reads the data: the clock measures the reading, not the loading of a library."""
    if workload.dataset.startswith("rcv1"):
        import sklearn.datasets  # noqa: F401


def _listen(plan: Plan) -> None:
    """What Ctrl-C, and a SIGTERM to every process of a job, do to this rank.

    In a training SIGTERM is a request to stop, on whichever rank, and under torchrun so is Ctrl-C. All else is left to
    the command that started the ranks, and with which they end.
    """
    def ask(number: int, frame: object) -> None:
        if plan.folder is not None:
            request_stop(Path(plan.folder))

    if not plan.launched:
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        signal.signal(signal.SIGTERM, ask if plan.keeps else signal.SIG_IGN)
    elif plan.keeps:
        signal.signal(signal.SIGINT, ask)
        signal.signal(signal.SIGTERM, ask)
