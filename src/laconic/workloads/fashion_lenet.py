"""LeNet on Fashion-MNIST."""

from __future__ import annotations

from laconic.workloads.inputs import Pixels
from laconic.workloads.objective import CLASSIFICATION
from laconic.workloads.optimizers import momentum
from laconic.workloads.registry import register
from laconic.workloads.schedules import linear_decay
from laconic.workloads.workload import Workload


@register("fashion-lenet")
def fashion_lenet() -> Workload:
    """LeNet (431,080 parameters) on Fashion-MNIST."""
    return Workload(
        name="fashion-lenet",
        dataset="fashion",
        model="lenet",
        objective=CLASSIFICATION,
        optimizer=momentum,
        optimizer_name="SGD, momentum 0.9, rate falling linearly to 0",
        learning_rate=0.05,
        batch=128,
        epochs=8,
        target=0.9,
        inputs=Pixels(),
        schedule=linear_decay,
    )
