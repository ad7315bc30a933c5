"""Deep Gradient Compression in NumPy, one rank after the other: Lin et al. 2018, Alg. 4 (and Nesterov's form).

Gradients are not divided by the number of ranks P before they are exchanged, as in DDP; the paper's are, so its
threshold P^(-1/2)·clip_norm for g/P is P^(1/2)·clip_norm for g.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float32]
Select = Callable[[Floats], NDArray[np.bool_]]


def clip(gradient: Floats, clip_norm: float | None, world_size: int) -> Floats:
    if clip_norm is None:
        return gradient
    contribution = gradient.astype(np.float64) / world_size
    norm, most = np.sqrt(np.sum(contribution**2)), clip_norm / np.sqrt(world_size)
    return (contribution * min(1.0, most / norm) * world_size).astype(np.float32) if norm > 0 else gradient


def largest(k: int) -> Select:
    """The k largest magnitudes, ties to the lower index."""

    def select(v: Floats) -> NDArray[np.bool_]:
        mask = np.zeros(v.size, np.bool_)
        mask[np.argsort(-np.abs(v), kind="stable")[:k]] = True
        return mask

    return select


def beyond(threshold: float) -> Select:
    return lambda v: np.abs(v) > np.float32(threshold)


def everything(v: Floats) -> NDArray[np.bool_]:
    return np.ones(v.size, np.bool_)


class Rank:
    """The state of one rank for one vector."""

    def __init__(self, numel: int, momentum: float, *, nesterov: bool = False, masking: bool = True) -> None:
        self.m, self.nesterov, self.masking = np.float32(momentum), nesterov, masking
        self.u = np.zeros(numel, np.float32)
        self.v = np.zeros(numel, np.float32)

    def send(self, gradient: Floats, select: Select) -> Floats:
        """What this rank contributes to the sum in this step."""
        self.u = self.m * self.u + gradient
        self.v = self.v + (gradient + self.m * self.u if self.nesterov else self.u)
        mask = select(self.v)
        sent = np.where(mask, self.v, np.float32(0))
        self.v = np.where(mask, np.float32(0), self.v)
        if self.masking:
            self.u = np.where(mask, np.float32(0), self.u)
        return sent


def step(
    ranks: Sequence[Rank], gradients: Sequence[Floats], select: Select, clip_norm: float | None = None
) -> Floats:
    """The mean of what the ranks send, added in the order of the ranks."""
    total = np.zeros(gradients[0].size, np.float32)
    for rank, gradient in zip(ranks, gradients, strict=True):
        total = total + rank.send(clip(gradient, clip_norm, len(ranks)), select)
    return total / np.float32(len(ranks))
