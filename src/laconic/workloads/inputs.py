"""Turn stored samples into a model's inputs: scaled, and in training shifted and mirrored.

Callers: `Task`. Invariant: a sample's input depends on (seed, epoch, sample number) alone, so that a
distributed run sees the same images as a sequential one and a resumed run the same as an uninterrupted one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional


@dataclass(frozen=True)
class Inputs:
    """Turns stored samples into a model's input: here, as they are."""

    def draws(self, samples: int, seed: int, epoch: int) -> Tensor | None:
        """Random numbers of an epoch, one row per sample; None where nothing is random."""
        return None

    def __call__(self, x: Any, draws: Tensor | None = None) -> Any:
        """The input for samples `x`; `draws` are their rows in training, None in testing."""
        return x


AS_STORED = Inputs()


@dataclass(frozen=True)
class Tokens(Inputs):
    """Characters as int64, which embeddings take."""

    def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        return x.long()


@dataclass(frozen=True)
class Pixels(Inputs):
    """(pixel / largest − mean) / deviation, per channel."""

    largest: float = 255.0
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)

    def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        mean, deviation = (torch.tensor(values).reshape(1, -1, 1, 1) for values in (self.mean, self.deviation))
        return (x.float() / self.largest - mean) / deviation


CIFAR_PIXELS = Pixels(mean=(0.4914, 0.4822, 0.4465), deviation=(0.2470, 0.2435, 0.2616))  # of the training images


@dataclass(frozen=True)
class ShiftedPixels(Inputs):
    """Pixels, then a square of `size` at a random place, mirrored every other time; from the middle in testing.

    Attributes:
        pixels: the scaling.
        size: height and width of what is cut out.
        padding: zeros put around the image first.
        mirrored: False for what has a right way round, such as digits.
    """

    pixels: Pixels
    size: int
    padding: int
    mirrored: bool = True

    def draws(self, samples: int, seed: int, epoch: int) -> Tensor:
        """Row, column (as fractions of the room there is) and mirror of each sample."""
        return torch.from_numpy(np.random.default_rng([0xA06, seed, epoch]).random((samples, 3), dtype=np.float32))

    def __call__(self, x: Tensor, draws: Tensor | None = None) -> Tensor:
        images = functional.pad(self.pixels(x), (self.padding,) * 4)
        room = images.shape[2] - self.size
        if draws is None:
            start = room // 2
            return images[:, :, start : start + self.size, start : start + self.size]
        corner = (draws[:, :2] * (room + 1)).long().clamp_(max=room)
        span = torch.arange(self.size)
        rows = corner[:, 0, None] + span
        is_mirrored = (draws[:, 2, None] >= 0.5) & self.mirrored
        columns = corner[:, 1, None] + torch.where(is_mirrored, span.flip(0), span)
        sample = torch.arange(len(images))[:, None, None, None]
        channel = torch.arange(images.shape[1])[None, :, None, None]
        return images[sample, channel, rows[:, None, :, None], columns[:, None, None, :]]
