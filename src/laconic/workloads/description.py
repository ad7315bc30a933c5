"""The description of a workload in a run's record: plain values, readable without the training code.

Callers: `Task.describe` fills it in; `lab` records, checks and reports it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Description:
    """What is trained, on what, and when it stops. Shapes are of one sample; null where they were not said.

    `batch` is the samples of a step over all workers, in the first epoch; `batch_schedule` says how it grows.
    """

    name: str
    model: str
    parameters: int
    dataset: str
    dataset_source: str
    train_samples: int
    test_samples: int
    target_accuracy: float | None
    stopping_rule: str
    optimizer: str
    learning_rate: float
    epochs: float
    batch_per_worker: int
    batch: int | None = None
    target_metric: str = "test accuracy"
    precision: str = "float32"
    input_shape: list[int] | None = None
    native_shape: list[int] | None = None
    batch_schedule: str = "constant"

    @property
    def judged_by_loss(self) -> bool:
        """Whether less is better: the target, in `target_accuracy`, is then of a loss ("test bits per character")."""
        return "accuracy" not in self.target_metric

    @property
    def target_loss(self) -> float | None:
        """The target as a value of `test_loss`, in nats where the metric is in bits; None if judged by accuracy."""
        if self.target_accuracy is None or not self.judged_by_loss:
            return None
        return self.target_accuracy * (math.log(2) if "bits" in self.target_metric else 1.0)
