"""The mean of several workers' gradients, in a fixed order, so that it has the same bits whoever computes it.

Callers: `group.py` and `consistency/backup.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor


class Mean(NamedTuple):
    """What a step applies: the mean gradient, and the places of those in it; who has no samples is not."""

    values: Tensor
    included: tuple[int, ...]


def weighted_mean(parts: Sequence[tuple[int, Tensor]], out: Tensor) -> None:
    """out = Σ nᵢ·gᵢ / Σ nᵢ over (nᵢ, gᵢ) in the order given; of one alone, its own bits.

    >>> out = torch.empty(2)
    >>> weighted_mean([(1, torch.tensor([0.0, 4.0])), (3, torch.tensor([4.0, 0.0])), (0, torch.ones(2))], out)
    >>> out
    tensor([3., 1.])
    """
    total = sum(count for count, _ in parts)
    counted = [(count / total, values) for count, values in parts if count]
    weight, values = counted[0]
    torch.mul(values, weight, out=out)
    for weight, values in counted[1:]:
        out.add_(values, alpha=weight)
