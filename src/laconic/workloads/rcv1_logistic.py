"""Logistic regression on Reuters documents: sparse features, convex, as in the top-k slides' first figure."""

from __future__ import annotations

from laconic.workloads.objective import LOGISTIC
from laconic.workloads.optimizers import plain
from laconic.workloads.registry import register
from laconic.workloads.schedules import linear_decay
from laconic.workloads.workload import Workload


@register("rcv1-logistic")
def rcv1_logistic() -> Workload:
    """Logistic regression on RCV1's 47,236 term weights; the gradient is dense to the exchange, mostly zero in value.

    Source: Renggli et al., SparCML, 2018 (RCV1 convergence).
    """
    return Workload(
        name="rcv1-logistic",
        dataset="rcv1",
        model="logistic",
        objective=LOGISTIC,
        optimizer=plain,
        optimizer_name="SGD, rate falling linearly to 0",
        learning_rate=10.0,
        batch=64,
        epochs=20,
        target=0.86,
        schedule=linear_decay,
    )
