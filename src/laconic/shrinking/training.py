"""Training and evaluation while a model shrinks: the user's functions, or those of a workload.

Callers: `laconic.shrink`. A trainer is called several times, and each call trains for a while: it makes its optimiser
over `model.parameters()` anew, since what is trained of a pruned or shared weight changes between calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

from torch import nn

from laconic.errors import BadInput
from laconic.workloads import Task, Workload, get

Train = Callable[[nn.Module], object]
Evaluate = Callable[[nn.Module], float]
Progress = Callable[[str, float], None]


class TrainingSteps:
    """Reports progress: what was done, and its share of all steps.

    Args:
        progress: is given a line and the share, from 0 to 1; None says nothing.
        total: how many steps are expected.
    """

    def __init__(self, progress: Progress | None, total: int = 1) -> None:
        self._progress, self.total, self._done = progress, total, 0

    def __call__(self, line: str) -> None:
        """A step was done."""
        self._done += 1
        self.say(line)

    def say(self, line: str) -> None:
        """Something else is worth a line."""
        if self._progress is not None:
            self._progress(line, min(1.0, self._done / max(1, self.total)))

    def reporting(self, train: Train | None) -> Train | None:
        """A trainer each call of which is a step."""
        if train is None:
            return None

        def trained(model: nn.Module) -> None:
            train(model)
            self("retrained")

        return trained


class TaskTraining:
    """Trains a model as a workload does, each time for `epochs` with a rate that falls from `rate` of its own to zero.

    Args:
        task: a prepared workload.
        epochs: of one call.
        rate: the share of the workload's learning rate that a call starts with.
        calls: how often it was called before; each call sees the samples in other orders.
    """

    def __init__(self, task: Task, epochs: int, rate: float = 0.3, calls: int = 0) -> None:
        if epochs < 1:
            raise BadInput(f"retraining takes 1 epoch or more, got {epochs}")
        self.task, self.epochs, self.rate = task, epochs, rate
        self._calls = calls

    def __call__(self, model: nn.Module) -> None:
        task = self.task
        optimizer = task.optimizer([p for p in model.parameters() if p.requires_grad])
        steps = task.steps_per_epoch()
        model.train()
        for epoch in range(self.epochs):
            order = self._calls * self.epochs + epoch
            for step in range(steps):
                task.begin_step(optimizer, order, step)
                for group in optimizer.param_groups:
                    left = 1 - (epoch + step / steps) / self.epochs
                    group["lr"] = task.workload.learning_rate * self.rate * left
                optimizer.zero_grad()
                task.loss(model, task.batch(order, step)).backward()
                optimizer.step()
        model.eval()
        self._calls += 1


def error_of(task: Task) -> Evaluate:
    """The error of a model on a task's test data: 1 − accuracy, or the metric where less is better."""
    objective = task.workload.objective

    def error(model: nn.Module) -> float:
        value = task.evaluate(model)[objective.metric]
        return 1 - value if objective.higher_is_better else value

    return error


def resolve(
    train: Train | Workload | Task | str | None, evaluate: Evaluate | None
) -> tuple[Train | None, Evaluate | None]:
    """A trainer and a judge from what the user gave; a workload is both, unless there is another judge."""
    trainer, judge = _resolved(train, evaluate)
    return trainer, None if judge is None else partial(_judged, judge)


def _judged(evaluate: Evaluate, model: nn.Module) -> float:
    """A model's error in evaluation mode, in which it is not changed; one that is not a number is above all others."""
    training = [module for module in model.modules() if module.training]
    model.eval()
    try:
        found = evaluate(model)
    finally:
        for module in training:
            module.training = True
    try:
        error = float(found)
    except (TypeError, ValueError, RuntimeError):
        raise BadInput(f"evaluate gives a model's error, one number, and gave {found!r}") from None
    return math.inf if math.isnan(error) else error


def _resolved(
    train: Train | Workload | Task | str | None, evaluate: Evaluate | None
) -> tuple[Train | None, Evaluate | None]:
    if isinstance(train, str):
        train = get(train)
    if isinstance(train, Workload):
        train = train.prepare()
    if isinstance(train, Task):
        train = TaskTraining(train, max(1, train.workload.epochs // 4))
    if isinstance(train, TaskTraining):
        return train, evaluate or error_of(train.task)
    if train is not None and not callable(train):
        raise BadInput(f"train is a function of a model, a workload or its name, got {type(train).__name__}")
    if evaluate is not None and not callable(evaluate):
        raise BadInput(f"evaluate is a function of a model, got {type(evaluate).__name__}")
    return train, evaluate
