"""A workload: everything that decides what a training run computes, except the seed and how it is divided.

Callers: the registry and the trainer. Frozen, so that a run's record and what was run cannot drift apart.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.errors import BadInput
from laconic.workloads import data as datasets
from laconic.workloads import models
from laconic.workloads.data import Dataset
from laconic.workloads.inputs import AS_STORED, Inputs
from laconic.workloads.objective import Objective

if TYPE_CHECKING:
    from laconic.workloads.task import Task

Scaling = Literal["strong", "weak"]


def constant(progress: float) -> float:
    """A learning rate that stays as it is."""
    return 1.0


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

    @property
    def metric(self) -> str:
        """What the target is about, as a report names it."""
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
        """The model and the data of a run; see `prepare`."""
        return prepare(self, seed, data, scaling)


def prepare(
    workload: Workload, seed: int = 0, data: Dataset | str | Path | None = None, scaling: Scaling = "strong"
) -> Task:
    """The model and the data of a run.

    >>> from laconic.workloads import get
    >>> task = get("digits-mlp").prepare(seed=1)
    >>> task.steps_per_epoch(world_size=4)
    23

    Args:
        workload: what to train.
        seed: of the model's start, the order of the data, shifts and dropout.
        data: a dataset already in memory, a folder to read it from, or None for the usual places.
        scaling: "strong" divides the batch among the workers; "weak" gives each a batch, so that it grows with them.
    """
    from laconic.workloads.task import Task

    if not isinstance(seed, int) or seed < 0:
        raise BadInput(f"a seed is a whole number ≥ 0, got {seed!r}")
    if scaling not in ("strong", "weak"):
        raise BadInput(f"scaling is 'strong' or 'weak', got {scaling!r}")
    dataset = data if isinstance(data, Dataset) else workload.load(data)
    return Task(workload, seed, dataset, scaling)
