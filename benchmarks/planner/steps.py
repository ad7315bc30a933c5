"""Steps by every way of a set-up, measured in turns: what `groups.py` compares its predictions with.

Caller: `groups.py`. Unlike `laconic bench step`, all ways share one process a host, so that a hundred set-ups take
minutes; they take turns in short blocks, whose order rotates. A step is timed from its beginning to that of the next,
on the slowest host: mean of a block, median of blocks. A block's first step, which brings the model back into the
caches, is not counted.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
import torch.distributed as dist
from torch import Tensor, nn

from laconic.consistency.distribute import distribute
from laconic.exchange.costs import GUESS
from laconic.parallel.divide import divide
from laconic.parallel.pipeline import Pipeline
from laconic.planner.strategy import Strategy
from laconic.schedules.link import Link
from laconic.transports.profile import Profile
from laconic.transports.world import World
from laconic.workloads import Task, get
from laconic.workloads.data import Dataset
from laconic.workloads.workload import Batch
from laconic_lab.bench.step import ALONE, Steps, StepSpec
from laconic_lab.bench.turns import SECONDS, Figures, Turns, Way, host, on_hosts, slowest
from laconic_lab.runs.spec import SINGLE, configuration

WARM_UP = 3
MOST_STEPS = 15
SLOW_S = 0.3  # a step that takes longer is hardly disturbed: two blocks of it will do
TIMEOUT_S = 300.0
LOOPBACK = "16gbit"  # gloo moves some 2 GB/s within a machine


@dataclass(frozen=True)
class SetUp:
    """What is measured together.

    Attributes:
        workload: its name; each replica has its batch.
        hosts: one process each, on a core in turn.
        link: speed of emulated links; None is this machine's loopback.
        ways: configurations of the laboratory, or names of `divided`.
        divided: (strategy, division) of models that are shared by several hosts.
        blocks: turns of each way.
        block_s: how long a turn lasts, about.
    """

    workload: str
    hosts: int
    link: str | None
    ways: tuple[str, ...]
    divided: Mapping[str, tuple[Strategy, str]] = field(default_factory=dict)
    blocks: int = 4
    block_s: float = 0.15


class Trained(Protocol):
    """One way at work on this rank."""

    def step(self) -> object:
        """Train one step."""
        ...

    def settle(self) -> None:
        """Wait for exchanges that may still be under way."""
        ...

    def close(self) -> None:
        """End threads."""
        ...


class _Replicated:
    """A way of the laboratory, in which every host has the whole model."""

    def __init__(self, given: SetUp, name: str, task: Task, world: World) -> None:
        chosen = configuration(SINGLE, 1) if name == ALONE else configuration(name, given.hosts)
        self._steps = Steps(StepSpec(given.workload, [name], given.hosts, given.link), chosen, task, world)

    def step(self) -> object:
        return self._steps.run(1)

    def settle(self) -> None:
        self._steps.trainee.module.state_dict()

    def close(self) -> None:
        self._steps.trainee.finish()
        self._steps.trainee.close()


class _Divided:
    """A model that several hosts share, by layers or by stages; such groups agree as `distribute` lets them."""

    def __init__(self, given: SetUp, name: str, task: Task, world: World) -> None:
        way, division = given.divided[name]
        shared = way.tensor * way.pipeline
        ranks = range(world.world_size)
        inside = world.split([rank // shared for rank in ranks]) if way.data > 1 else world
        self._task, self._part, self._parts, self._micro = task, world.rank // shared, way.data, way.micro_batches
        sample = self._batch(0, 0).x.chunk(self._micro)[0]
        self._model: nn.Module = divide(copy.deepcopy(task.model), division, world=inside, sample=(sample,))
        self._optimizer = task.optimizer(self._model.parameters())
        self._job = None
        if way.data > 1:
            between = world.split([rank % shared for rank in ranks])
            self._job = distribute(self._model, self._optimizer, codec=way.codec, world=between)
        self._step = 0

    def _batch(self, epoch: int, step: int) -> Batch:
        """This replica's samples, as many as make equal micro-batches."""
        x, y, weight = self._task.batch(epoch, step, self._part, self._parts)
        whole = len(y) // self._micro * self._micro
        return Batch(x[:whole], y[:whole], weight)

    def step(self) -> None:
        epoch, step = divmod(self._step, self._task.steps_per_epoch(self._parts))
        self._task.begin_step(self._optimizer, epoch, step, 0, self._parts)
        self._optimizer.zero_grad()
        batch = self._batch(epoch, step)
        if isinstance(self._model, Pipeline):
            self._model.step(batch.x, batch.y, self._mean_loss)
        else:
            self._task.loss(self._model, batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.step()
        self._step += 1

    def _mean_loss(self, output: Tensor, y: Tensor) -> Tensor:
        return self._task.workload.objective.losses(output, y).mean()

    def settle(self) -> None:
        if self._job is not None:
            self._model.state_dict()

    def close(self) -> None:
        if self._job is not None:
            self._job.finish()
            self._job.close()


def measure(given: SetUp) -> dict[str, list[float]]:
    """Seconds of a step in each block, by way; "alone" is the same step without any exchange.

    Raises:
        BadInput: a workload, way or link that cannot be.
        RankFailed: a rank failed; all are then stopped.
    """
    ranks, _ = on_hosts(given.hosts, given.link, run_rank, (given,), TIMEOUT_S)
    return {name: slowest([rank[name] for rank in ranks]) for name in ranks[0]}


def link_of(rate: str | None) -> Link:
    """What a user would say of the link: its rate, and nothing of its latency."""
    return Link.parse(LOOPBACK if rate is None else rate)


def run_rank(given: SetUp) -> dict[str, Figures]:
    """All ways on this rank, in turns."""
    with host(timeout_s=TIMEOUT_S) as world:
        told = replace(link_of(given.link), latency_s=GUESS.latency_s)  # as the laboratory tells its workers
        world.profile = Profile(world.engine, given.hosts, told)
        data = get(given.workload).load()
        ways = {name: _trained(given, name, data, world) for name in (ALONE, *given.ways)}
        found = _turns(given, ways)
        for way in ways.values():
            way.close()
        return found


def _trained(given: SetUp, name: str, data: Dataset, world: World) -> Trained:
    """Every host adds the workload's batch to a step, whoever computes it."""
    workload = get(given.workload)
    if name not in given.divided:
        return _Replicated(given, name, workload.prepare(0, data, scaling="weak"), world)
    shared = given.hosts // given.divided[name][0].data
    return _Divided(given, name, replace(workload, batch=workload.batch * shared).prepare(0, data, "weak"), world)


def _turns(given: SetUp, ways: dict[str, Trained]) -> dict[str, Figures]:
    guess = {name: _seconds_of(way) for name, way in ways.items()}
    calls = {name: max(1, min(MOST_STEPS, math.ceil(given.block_s / seconds))) for name, seconds in guess.items()}
    turns = Turns({name: Way(way.step, calls[name], lead=1, trail=1, settle=way.settle) for name, way in ways.items()},
                  given.link, dist.barrier)  # fmt: skip
    return turns.run(given.blocks, warm_up=0, skip=lambda name, block: block > 1 and guess[name] > SLOW_S)


def _seconds_of(way: Trained) -> float:
    """Warm up; about how long a step takes, the same number on all ranks."""
    block = Turns({"": Way(way.step, 2, lead=WARM_UP, trail=1, settle=way.settle)}, together=dist.barrier).block("")
    seconds = torch.tensor(max(1e-4, block[SECONDS]))
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)
