"""A workload, and the task it becomes with a seed: everything that decides what a training run computes.

Callers: the registry and the trainer. A workload is frozen, so that a run's record and what was run cannot drift apart.
A task has the model and the data; a trainer drives it, step by step:

    task = get("digits-mlp").prepare(seed=0)
    optimizer = task.optimizer(task.model.parameters())
    for epoch in range(task.workload.epochs):
        for step in range(task.steps_per_epoch(world_size)):
            task.begin_step(optimizer, epoch, step, rank)
            optimizer.zero_grad()
            task.loss(task.model, task.batch(epoch, step, rank, world_size)).backward()
            …                                              # average the gradients over the ranks
            optimizer.step()
        scores = task.evaluate(task.model)

Invariant: nothing depends on what was called before. Any (epoch, step) can be the first, so that a run resumes from its
checkpoint of model and optimiser alone.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.errors import BadInput
from laconic.workloads import data as datasets
from laconic.workloads import models
from laconic.workloads.batch_schedules import CONSTANT, BatchSchedule
from laconic.workloads.data import Dataset, EpochOrder, SparseRows, Split
from laconic.workloads.description import Description
from laconic.workloads.inputs import AS_STORED, Inputs
from laconic.workloads.objective import Objective
from laconic.workloads.optimizers import constant
from laconic.workloads.order import steps

EVALUATION_BATCH = 500
Scaling = Literal["strong", "weak"]


@dataclass(frozen=True)
class Workload:
    """What is trained.

    Attributes:
        name: the spec it was got by.
        dataset: name of the dataset, with `data_options` for its reader.
        model: spec of the network.
        objective: loss and metric.
        optimizer: (parameters, learning rate) -> optimiser.
        optimizer_name: as the record names it, with its settings.
        learning_rate: at the start.
        batch: samples per step over all workers (strong scaling), or of each worker (weak).
        epochs: how long it trains.
        target: the metric's value that counts as trained.
        inputs: how stored samples become inputs.
        plan: progress in [0, 1) -> factor on the learning rate.
        batch_schedule: how the batch grows with the epochs.
        data_options: of the dataset's reader.
    """

    name: str
    dataset: str
    model: str
    objective: Objective
    optimizer: Callable[[Iterable[Tensor], float], Optimizer]
    optimizer_name: str
    learning_rate: float
    batch: int
    epochs: int
    target: float
    inputs: Inputs = AS_STORED
    plan: Callable[[float], float] = constant
    data_options: tuple[tuple[str, Any], ...] = ()
    batch_schedule: BatchSchedule = CONSTANT

    def batches(self, samples: int) -> tuple[int, ...]:
        """Samples of a step in each epoch, where the training set has `samples`."""
        rates = [self.plan(epoch / self.epochs) for epoch in range(self.epochs)]
        return self.batch_schedule.batches(self.batch, samples, rates)

    @property
    def metric(self) -> str:
        """The metric of the target, as a report names it."""
        return f"test {self.objective.metric}"

    @property
    def slug(self) -> str:
        """The name as part of a file name: `cifar-resnet(110)` is cifar-resnet-110."""
        return re.sub(r"[^A-Za-z0-9]+", "-", self.name).strip("-")

    @property
    def stopping_rule(self) -> str:
        """When training ends and when the target counts as reached, in a sentence."""
        sign = "≥" if self.objective.higher_is_better else "≤"
        return (
            f"stop after {self.epochs} epochs; the target, {self.metric} {sign} {self.target:g}, is tested after every "
            "epoch and reached at the first that meets it"
        )

    def load(self, folder: str | Path | None = None, *, download: bool = True) -> Dataset:
        """Read the data; see `data.load`."""
        return datasets.load(self.dataset, folder, download=download, **dict(self.data_options))

    def build(self, seed: int) -> nn.Module:
        """The network, started from `seed` alone: the random state of the caller is neither used nor changed."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            return models.build(self.model)

    def prepare(
        self, seed: int = 0, data: Dataset | str | Path | None = None, scaling: Scaling = "strong"
    ) -> Task:
        """The model and the data of a run.

        >>> from laconic.workloads import get
        >>> task = get("digits-mlp").prepare(seed=1)
        >>> task.steps_per_epoch(world_size=4)
        23

        Args:
            seed: of the model's start, the order of the data, shifts and dropout.
            data: a dataset already in memory, a folder to read it from, or None for the usual places.
            scaling: "strong" divides the batch among the workers; "weak" gives each a batch, so that it grows with
                them.
        """
        if not isinstance(seed, int) or seed < 0:
            raise BadInput(f"a seed is a whole number ≥ 0, got {seed!r}")
        if scaling not in ("strong", "weak"):
            raise BadInput(f"scaling is 'strong' or 'weak', got {scaling!r}")
        return Task(self, seed, data if isinstance(data, Dataset) else self.load(data), scaling)


class Batch(NamedTuple):
    """A rank's share of a step.

    Attributes:
        x: inputs.
        y: targets.
        weight: world_size / samples of the step over all ranks; the loss is the sum of the samples' losses times this.
    """

    x: Any
    y: Tensor
    weight: float


class Task:
    """A workload ready to be trained; see `Workload.prepare`."""

    def __init__(self, workload: Workload, seed: int, data: Dataset, scaling: Scaling) -> None:
        self.workload = workload
        self.seed = seed
        self.data = data
        self.scaling = scaling
        self.model = workload.build(seed)
        self._batches = workload.batches(len(data.train))
        self._epoch: tuple[EpochOrder, Tensor | None] | None = None

    def __fingerprint__(self) -> tuple[object, ...]:
        """The inputs of its training and evaluation, as a key for kept results."""
        return self.workload, self.seed, self.data, self.scaling

    def optimizer(self, parameters: Iterable[Tensor]) -> Optimizer:
        """The workload's optimiser over `parameters`."""
        return self.workload.optimizer(parameters, self.workload.learning_rate)

    def global_batch(self, world_size: int, epoch: int = 0) -> int:
        """The most samples of a step over all ranks, in an epoch; in those after the last as in the last."""
        batch = self._batches[min(epoch, len(self._batches) - 1)]
        return batch * (world_size if self.scaling == "weak" else 1)

    def steps_per_epoch(self, world_size: int = 1, epoch: int = 0) -> int:
        """Steps of an epoch, which use every training sample once."""
        return steps(len(self.data.train), self.global_batch(world_size, epoch))

    def begin_step(self, optimizer: Optimizer, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> None:
        """Set the learning rate, and torch's random state for dropout, from (seed, epoch, step, rank) alone."""
        work, batch = self.workload, self.global_batch(1, epoch)
        progress = (epoch + step / self.steps_per_epoch(world_size, epoch)) / work.epochs
        factor = work.batch_schedule.rate(work.plan(progress), batch, self.global_batch(1), progress)
        for group in optimizer.param_groups:
            group["lr"] = work.learning_rate * factor
        torch.manual_seed(_mixed(self.seed, epoch, step, rank))

    def batch(self, epoch: int, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The share of rank `rank` in a step; the shares of all ranks are the same samples for every world size."""
        order, draws = self._order(epoch, self.global_batch(world_size, epoch))
        return self._batch(order.indices(step, rank, world_size), draws, world_size / order.size(step))

    def batch_of(self, epoch: int, numbers: Tensor) -> Batch:
        """Chosen samples of an epoch, weighted alike: their loss is the mean over them."""
        _, draws = self._order(epoch, self.global_batch(1))
        return self._batch(numbers, draws, 1 / len(numbers))

    def _batch(self, numbers: Tensor, draws: Tensor | None, weight: float) -> Batch:
        x = self.workload.inputs(self.data.train.x[numbers], None if draws is None else draws[numbers])
        return Batch(x, _target(self.data.train.y[numbers]), weight)

    def loss(self, model: nn.Module, batch: Batch) -> Tensor:
        """The rank's part of the loss: its average over the ranks is the mean over the batch, for gradients too.

        Shares may differ by a sample, even be empty: that is why the weight is the batch's and not the share's.
        """
        return self.workload.objective.losses(model(batch.x), batch.y).sum() * batch.weight

    @torch.no_grad()
    def evaluate(self, model: nn.Module, split: Literal["test", "train"] = "test") -> dict[str, float]:
        """Mean loss and, where it exists, accuracy over a whole split, in evaluation mode; the mode is put back."""
        samples: Split = self.data.test if split == "test" else self.data.train
        objective = self.workload.objective
        training = model.training
        model.eval()
        loss = hits = 0.0
        try:
            for start in range(0, len(samples), EVALUATION_BATCH):
                numbers = torch.arange(start, min(start + EVALUATION_BATCH, len(samples)))
                output = model(self.workload.inputs(samples.x[numbers]))
                target = _target(samples.y[numbers])
                loss += float(objective.losses(output, target).double().sum())
                hits += float(objective.hits(output, target).double().sum()) if objective.hits else 0.0
        finally:
            model.train(training)
        return objective.scores(loss / len(samples), hits / len(samples) if objective.hits else None)

    def reached(self, scores: dict[str, float]) -> bool:
        """Whether an evaluation meets the declared target."""
        return self.workload.objective.reached(scores, self.workload.target)

    def describe(self, world_size: int = 1) -> Description:
        """The `workload` part of a run's record."""
        workload = self.workload
        stored = self.data.train.x
        native = [stored.width] if isinstance(stored, SparseRows) else list(stored.shape[1:])
        used = workload.inputs(stored[torch.arange(1)])
        return Description(
            name=workload.name,
            model=workload.model,
            parameters=models.parameter_count(self.model),
            dataset=self.data.title,
            dataset_source=self.data.source,
            train_samples=len(self.data.train),
            test_samples=len(self.data.test),
            target_accuracy=workload.target if workload.objective.metric == "accuracy" else None,
            target_metric=workload.metric,
            stopping_rule=workload.stopping_rule,
            optimizer=workload.optimizer_name,
            learning_rate=workload.learning_rate,
            epochs=workload.epochs,
            batch_per_worker=-(-self.global_batch(world_size) // world_size),
            batch=workload.batch,
            batch_schedule=str(workload.batch_schedule),
            precision=str(next(self.model.parameters()).dtype).removeprefix("torch."),
            input_shape=list(used.shape[1:]) if isinstance(used, Tensor) else native,
            native_shape=native,
        )

    def _order(self, epoch: int, batch: int) -> tuple[EpochOrder, Tensor | None]:
        """The order and random numbers of an epoch; those of the last one asked for are kept."""
        kept = self._epoch
        if kept is None or (kept[0].epoch, kept[0].batch) != (epoch, batch):
            samples = len(self.data.train)
            order = EpochOrder(samples, batch, self.seed, epoch)
            kept = self._epoch = (order, self.workload.inputs.draws(samples, self.seed, epoch))
        return kept


def _target(y: Tensor) -> Tensor:
    """Targets as losses take them: stored characters are bytes."""
    return y.long() if y.dtype == torch.uint8 else y


def _mixed(*numbers: int) -> int:
    """A 63-bit seed that differs wherever one of the numbers does."""
    if min(numbers) < 0:
        raise BadInput(f"seed, epoch, step and rank are ≥ 0, got {numbers}")
    text = ",".join(map(str, numbers)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest()) >> 1
