"""LeNet on MNIST."""

from __future__ import annotations

from laconic.workloads.inputs import Pixels
from laconic.workloads.objective import CLASSIFICATION
from laconic.workloads.optimizers import momentum
from laconic.workloads.registry import register
from laconic.workloads.schedules import linear_decay
from laconic.workloads.workload import Workload


@register("mnist-lenet")
def mnist_lenet() -> Workload:
    """LeNet (431,080 parameters) on MNIST."""
    return Workload(
        name="mnist-lenet",
        dataset="mnist",
        model="lenet",
        objective=CLASSIFICATION,
        optimizer=momentum,
        optimizer_name="SGD, momentum 0.9, rate falling linearly to 0",
        learning_rate=0.05,
        batch=128,
        epochs=5,
        target=0.99,
        inputs=Pixels(),
        schedule=linear_decay,
    )
