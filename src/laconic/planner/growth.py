"""Effect of a growing batch on a whole training: fewer steps, each of which sends the same bytes.

Callers: `laconic plan --batch-schedule`. Predicted with the recommended strategy; accuracy is not.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

from laconic.errors import BadInput
from laconic.planner.plan import Planned
from laconic.planner.predict import predict
from laconic.workloads.batch_schedules import BatchSchedule
from laconic.workloads.order import steps


@dataclass(frozen=True)
class Phase:
    """Epochs that have the same batch; seconds and bytes are of one step."""

    epochs: int
    batch: int
    steps: int
    seconds: float
    sent_nbytes: float
    memory_nbytes: float


def phases(planned: Planned, schedule: BatchSchedule) -> list[Phase]:
    """A training of the workload by the recommended strategy, from the first epoch to the last.

    Raises:
        BadInput: the model is no workload, so its samples and epochs are unknown.
    """
    workload = planned.subject.workload
    if workload is None:
        raise BadInput(f"a batch schedule is a workload's, and '{planned.subject.name}' has neither data nor epochs")
    workload = replace(workload, batch=planned.setting.batch, batch_schedule=schedule)
    samples, found = len(workload.load().train), []
    for batch, group in itertools.groupby(workload.batches(samples)):
        epochs = len(list(group))
        step = predict(replace(planned.setting, batch=batch), planned.chosen.strategy)
        found.append(Phase(epochs, batch, epochs * steps(samples, batch), step.seconds, step.sent_nbytes,
                           step.memory_nbytes))  # fmt: skip
    return found


def totals(found: Sequence[Phase]) -> tuple[int, float, float]:
    """Steps, seconds and bytes of a whole training."""
    seconds = sum(each.steps * each.seconds for each in found)
    return sum(each.steps for each in found), seconds, sum(each.steps * each.sent_nbytes for each in found)
