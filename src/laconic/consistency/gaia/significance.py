"""Gaia's significance filter: which of the accumulated updates are large enough to be told to another site.

Callers: `link.py`. Pure: no communication.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


class Significance:
    """Updates accumulate until they matter: wᵢ's does when |aᵢ| > threshold/√t · |wᵢ|.

    a is the sum of all updates since value i was last told, t the step from 1, w the weights as they are. What is told
    is taken from a; what a biased codec loses of it stays.

    Args:
        numel: of the weights.
        threshold: relative change, 0.01 for 1 %.

    >>> filter = Significance(2, threshold=0.1)
    >>> filter.add(torch.tensor([0.3, 0.05]))
    >>> filter.select(torch.tensor([1.0, 1.0]), step=1).tolist()
    [0]

    Source: Hsieh et al., Gaia: Geo-Distributed Machine Learning Approaching LAN Speeds, NSDI 2017, §3.3.
    """

    def __init__(self, numel: int, threshold: float) -> None:
        self.threshold = threshold
        self.accumulated = torch.zeros(numel)

    def add(self, update: Tensor) -> None:
        """An update was applied here."""
        self.accumulated.add_(update)

    def select(self, weights: Tensor, step: int) -> Tensor:
        """The indices, sorted, of what is significant at `step`, counted from 1."""
        bar = weights.abs().mul_(self.threshold / math.sqrt(step))
        return torch.nonzero(self.accumulated.abs() > bar).reshape(-1)

    def take(self, chosen: Tensor, told: Tensor) -> None:
        """The chosen values were told as `told`."""
        self.accumulated[chosen] -= told
