"""YellowFin where every gradient is some steps old, its loop open and closed, beside SGD.

Caller: `search.py`. The delay is exact: the gradient of step t is computed with the weights of step t − τ, as P = τ + 1
workers in turn give it to a server.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from laconic.workloads import get
from laconic.workloads.yellowfin import YellowFin

WORKLOAD, EPOCHS, SEEDS, DELAYS = "digits-mlp", 12, 3, (0, 1, 3)
WAYS: dict[str, Callable[[Iterable[Tensor]], Optimizer]] = {
    "yellowfin, closed loop": lambda parameters: YellowFin(parameters, lr=0.3),
    "yellowfin, open loop": lambda parameters: YellowFin(parameters, lr=0.3, gain=0.0),
    "sgd, rate 0.2, momentum 0.9": lambda parameters: torch.optim.SGD(parameters, 0.2, 0.9),
    "sgd, rate 0.02, momentum 0.9": lambda parameters: torch.optim.SGD(parameters, 0.02, 0.9),
}


def delayed(make: Callable[[Iterable[Tensor]], Optimizer], delay: int, epochs: int, seed: int) -> float:
    """The test accuracy after training with gradients that are `delay` steps old."""
    task = get(WORKLOAD).prepare(seed)
    parameters = list(task.model.parameters())
    optimizer, trail = make(parameters), deque[list[Tensor]](maxlen=delay + 1)
    for epoch in range(epochs):
        for step in range(task.steps_per_epoch()):
            trail.append([p.detach().clone() for p in parameters])
            _set(parameters, trail[0])
            optimizer.zero_grad()
            task.loss(task.model, task.batch(epoch, step)).backward()  # type: ignore[no-untyped-call]
            _set(parameters, trail[-1])
            for group in optimizer.param_groups:
                if "staleness" in group:
                    group["staleness"] = len(trail) - 1
            optimizer.step()
    return task.evaluate(task.model)["accuracy"]


@torch.no_grad()
def _set(parameters: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    for parameter, value in zip(parameters, values, strict=True):
        parameter.copy_(value)


def stale() -> list[dict[str, Any]]:
    """Every optimiser at every delay, on the same seeds."""
    torch.set_num_threads(1)
    rows = []
    for delay in DELAYS:
        for name, make in WAYS.items():
            values = [delayed(make, delay, EPOCHS, seed) for seed in range(SEEDS)]
            rows.append({"workload": WORKLOAD, "epochs": EPOCHS, "staleness": delay, "optimizer": name,
                         "accuracy_mean": sum(values) / len(values), "values": values})  # fmt: skip
    return rows
