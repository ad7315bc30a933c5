"""Linear regression on made data with a known best error: dense, convex, as in the top-k slides' second figure."""

from __future__ import annotations

from laconic.workloads.objective import REGRESSION
from laconic.workloads.optimizers import plain
from laconic.workloads.plans import linear_decay
from laconic.workloads.registry import register
from laconic.workloads.workload import Workload


@register("linear")
def linear(features: int = 1000) -> Workload:
    """Linear regression on made data; noise leaves a squared error of 0.01, 0.0112 at best from 8,192 samples.

    Source: Renggli et al., SparCML, 2018 (linear regression).
    """
    return Workload(
        name="linear",
        dataset="linear",
        model=f"linear({features})",
        objective=REGRESSION,
        optimizer=plain,
        optimizer_name="SGD, rate falling linearly to 0",
        learning_rate=0.2,
        batch=64,
        epochs=15,
        target=0.012,
        plan=linear_decay,
        data_options=(("features", features),),
    )
