"""The settings of a workload that a user overrides: epochs, learning rate, batch, target.

Callers: `train` and `compare`, by their options, and the workers. The record keeps what was trained, so that a
resumption uses the same.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from typing import Any

from laconic.errors import BadInput
from laconic.workloads.batch_schedules import batch_schedule
from laconic.workloads.description import Description
from laconic.workloads.registry import get
from laconic.workloads.workload import Workload

LOSS = "test loss"  # the metric of a workload that is judged by its loss as it is


@dataclass(frozen=True)
class Changes:
    """None keeps the workload's own.

    >>> Changes(epochs=3).of("digits-mlp").epochs
    3
    >>> Changes(target_loss=0.3).of("digits-mlp").metric
    'test loss'

    Attributes:
        epochs: how long it trains.
        learning_rate: at the start.
        batch: samples of a step, over all workers.
        target: the test accuracy, or loss, that counts as trained.
        batch_schedule: spec of how the batch grows, such as `grow` or `grow(2048)`.
        target_loss: the test loss that counts as trained; in place of `target`, and the workload is judged by its loss.
    """

    epochs: int | None = None
    learning_rate: float | None = None
    batch: int | None = None
    target: float | None = None
    batch_schedule: str | None = None
    target_loss: float | None = None

    @classmethod
    def recorded(cls, workload: Description) -> Changes:
        """All that a run was trained with."""
        target, by_loss = workload.target_accuracy, workload.target_metric == LOSS
        return cls(int(workload.epochs), workload.learning_rate, workload.batch, None if by_loss else target,
                   workload.batch_schedule, target if by_loss else None)  # fmt: skip

    def of(self, spec: str) -> Workload:
        """The workload of that name with these changes.

        Raises:
            UnknownName: there is no such workload.
            BadInput: a value that no training can have.
        """
        workload = get(spec)
        if self.epochs is not None and self.epochs < 1:
            raise BadInput(f"--epochs must be at least 1, got {self.epochs}")
        if self.learning_rate is not None and not (self.learning_rate > 0 and math.isfinite(self.learning_rate)):
            raise BadInput(f"--learning-rate must be above 0, got {self.learning_rate}")
        if self.batch is not None and self.batch < 1:
            raise BadInput(f"--batch must be at least 1, got {self.batch}")
        by_accuracy = workload.objective.higher_is_better
        if self.target is not None and not (0 < self.target <= 1 if by_accuracy else self.target > 0):
            allowed = "a test accuracy above 0 and up to 1" if by_accuracy else "a test loss above 0"
            raise BadInput(f"--target is {allowed}, got {self.target}")
        if self.target_loss is not None:
            if self.target is not None:
                raise BadInput("--target and --target-loss are two targets: give one")
            if not (self.target_loss > 0 and math.isfinite(self.target_loss)):
                raise BadInput(f"--target-loss is a test loss above 0, got {self.target_loss}")
            judged = replace(workload.objective, metric="loss", higher_is_better=False)
            workload = replace(workload, objective=judged, target=self.target_loss)
        asked: dict[str, Any] = {each.name: getattr(self, each.name) for each in fields(self)}
        del asked["target_loss"]
        if self.batch_schedule is not None:
            asked["batch_schedule"] = batch_schedule(self.batch_schedule)
        return replace(workload, **{name: value for name, value in asked.items() if value is not None})


AS_DECLARED = Changes()
