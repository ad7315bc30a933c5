"""torch's optimisers with the settings that a record names, and learning-rate plans.

A plan is the factor on the learning rate at a share of the training in [0, 1): it has no state, so resuming needs none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

import torch
from torch import Tensor

from laconic.workloads.yellowfin import YellowFin

plain = torch.optim.SGD
momentum = partial(torch.optim.SGD, momentum=0.9)
adam = torch.optim.Adam
rmsprop = partial(torch.optim.RMSprop, alpha=0.9)  # the mean of squares decays as in the lecture that introduced it


def adamw(parameters: Iterable[Tensor], lr: float) -> torch.optim.AdamW:
    """Adam with weights decayed by 0.1 · rate a step, but not gains and biases; squares are forgotten sooner, as small
    batches need it."""
    trained = list(parameters)
    matrices, vectors = [p for p in trained if p.dim() > 1], [p for p in trained if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW([group for group in groups if group["params"]], lr, betas=(0.9, 0.99))


# by the names that a search has for them
OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam, "adamw": adamw, "momentum": momentum, "rmsprop": rmsprop, "sgd": plain, "yellowfin": YellowFin,
}  # fmt: skip


def constant(progress: float) -> float:
    """The rate stays as it is."""
    return 1.0


def linear_decay(progress: float) -> float:
    """Decay linearly from the full rate to zero at the end."""
    return 1.0 - progress


def steps_down(*places: float, factor: float = 0.1) -> Callable[[float], float]:
    """The rate is multiplied by `factor` at each of the given shares of the training.

    >>> rate = steps_down(0.5, 0.75)
    >>> [round(rate(progress), 3) for progress in (0.0, 0.5, 0.9)]
    [1.0, 0.1, 0.01]
    """

    def rate(progress: float) -> float:
        return float(factor ** sum(progress >= place for place in places))

    return rate


def warmed_up(share: float, after: Callable[[float], float]) -> Callable[[float], float]:
    """Grows in proportion over the first `share` of the training, then follows `after`."""

    def rate(progress: float) -> float:
        return min(1.0, (progress + 0.1 * share) / share) * after(progress)

    return rate
