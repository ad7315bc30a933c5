"""The optimisers workloads use, torch's own, with the settings that a record names."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from torch import Tensor


def momentum(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    """Stochastic gradient descent with momentum 0.9."""
    return torch.optim.SGD(parameters, lr=rate, momentum=0.9)


def plain(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    """Stochastic gradient descent."""
    return torch.optim.SGD(parameters, lr=rate)


def adam(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    """Adam with torch's settings."""
    return torch.optim.Adam(parameters, lr=rate)


def rmsprop(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
    """RMSProp whose mean of squares decays by 0.9, as in the lecture that introduced it."""
    return torch.optim.RMSprop(parameters, lr=rate, alpha=0.9)


def decayed_momentum(weight_decay: float) -> Callable[[Iterable[Tensor], float], torch.optim.Optimizer]:
    """Stochastic gradient descent with momentum 0.9 and weight decay."""

    def optimizer(parameters: Iterable[Tensor], rate: float) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, lr=rate, momentum=0.9, weight_decay=weight_decay)

    return optimizer
