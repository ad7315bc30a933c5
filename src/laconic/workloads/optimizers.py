"""The optimisers workloads use, torch's own, with the settings that a record names."""

from __future__ import annotations

from collections.abc import Iterable

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
