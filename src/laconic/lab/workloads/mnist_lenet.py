"""LeNet on MNIST."""

from __future__ import annotations

from laconic.lab.workloads.inputs import Pixels
from laconic.lab.workloads.objective import CLASSIFICATION
from laconic.lab.workloads.optimizers import momentum
from laconic.lab.workloads.registry import register
from laconic.lab.workloads.schedules import linear_decay
from laconic.lab.workloads.workload import Workload


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
