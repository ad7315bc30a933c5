"""Validation losses of one training by samples, which do not depend on the link: nothing is emulated here.

Caller: `wan.py`. The loss is that of the mean of all workers' weights, on some of the validation set as training
goes on, and at the end, after `finish`, on all of it. The workload's plan of learning rates is stretched to the number
of steps that are made.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from laconic.errors import BadInput
from laconic.transports.launcher import run_local
from laconic.workloads import Task, get
from laconic.workloads.data import Split
from laconic_lab.bench.step import Steps, StepSpec
from laconic_lab.bench.turns import host
from laconic_lab.runs.spec import configuration
from laconic_lab.runs.trainee import Times

EVALUATED = 256  # validation samples of a point of the curve
TIMEOUT_S = 24 * 3600.0


@dataclass(frozen=True)
class CurveSpec:
    """One training.

    Attributes:
        workload, config, seed, hosts: what is trained, how, from where, by how many.
        steps: in all.
        every: steps between two points of the curve.
    """

    workload: str
    config: str
    seed: int
    steps: int
    every: int
    hosts: int = 2


def train(spec: CurveSpec) -> dict[str, Any]:
    """The curve as [step, loss] pairs, the loss at the end, and the payload bytes that a host sent in all."""
    return run_local(spec.hosts, run_rank, (spec,), TIMEOUT_S)[0]


def run_rank(spec: CurveSpec) -> dict[str, Any]:
    """Train on this rank."""
    with host(timeout_s=TIMEOUT_S) as world:
        task = get(spec.workload).prepare(spec.seed, scaling="weak")
        stretch(task, spec.steps, spec.hosts)
        judge = Judge(task)
        steps = Steps(
            StepSpec(spec.workload, [spec.config], spec.hosts), configuration(spec.config, spec.hosts), task, world
        )
        trainee, curve, sent = steps.trainee, [], 0.0
        formula = (
            0.0 if trainee.counts else sum(trainee.payload(*each)[1] for each in trainee.module.named_parameters())
        )
        for step in range(1, spec.steps + 1):
            steps.run(1)
            sent += trainee.parts(Times(0.0, 0.0, 0.0, 0.0)).sent if trainee.counts else formula
            if step % spec.every == 0:
                curve.append([step, judge.loss(trainee.module)])
        trainee.finish()
        ends = task.evaluate(trainee.module)["loss"] if world.rank == 0 else 0.0
        trainee.close()
        return {"curve": curve, "loss": ends, "sent_nbytes": sent}


def stretch(task: Task, steps: int, hosts: int) -> None:
    """Let the plan of learning rates end after so many steps, however many epochs they are."""
    per_epoch, work = task.steps_per_epoch(hosts), task.workload
    plan: Callable[[float], float] = work.plan
    scale = work.epochs * per_epoch / steps
    task.workload = replace(work, plan=lambda progress: plan(min(1.0, progress * scale)))


class Judge:
    """Losses of the mean of all workers' models, in a model and a group of its own."""

    def __init__(self, task: Task) -> None:
        self._model = copy.deepcopy(task.model)
        test = task.data.test
        if not isinstance(test.x, torch.Tensor):
            raise BadInput(f"workload '{task.workload.name}' has sparse samples, of which no curve is taken here")
        numbers = torch.arange(0, len(test), max(1, len(test) // EVALUATED))[:EVALUATED]
        self._task = copy.copy(task)
        self._task.data = replace(task.data, test=Split(test.x[numbers], test.y[numbers]))
        self._group = dist.new_group()

    def loss(self, model: nn.Module) -> float:
        """The same number on all ranks; the trained model is left alone."""
        for mean, own in zip(self._model.state_dict().values(), model.state_dict().values(), strict=True):
            mean.copy_(own)
            if mean.is_floating_point():
                dist.all_reduce(mean, group=self._group)
                mean.div_(dist.get_world_size())
        random = torch.get_rng_state()
        found = self._task.evaluate(self._model)["loss"]
        torch.set_rng_state(random)
        return found
