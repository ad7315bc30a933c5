"""The embedded default: a small fully connected network on scikit-learn's digits, no file needed."""

from __future__ import annotations

from laconic.workloads.inputs import Pixels
from laconic.workloads.objective import CLASSIFICATION
from laconic.workloads.optimizers import momentum
from laconic.workloads.registry import register
from laconic.workloads.schedules import linear_decay
from laconic.workloads.workload import Workload


@register("digits-mlp")
def digits_mlp() -> Workload:
    """A 64-256-256-10 network on 8×8 digits: seconds, no download."""
    return Workload(
        name="digits-mlp",
        dataset="digits",
        model="mlp((64, 256, 256, 10), dropout=())",
        objective=CLASSIFICATION,
        optimizer=momentum,
        optimizer_name="SGD, momentum 0.9, rate falling linearly to 0",
        learning_rate=0.2,
        batch=64,
        epochs=20,
        target=0.97,
        inputs=Pixels(largest=16.0),
        schedule=linear_decay,
    )
