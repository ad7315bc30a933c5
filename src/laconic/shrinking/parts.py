"""A tensor's part of a file: raw, coded without loss, or few values that weights share.

Callers: `file.py` reads and writes parts, the pipeline makes them. Each knows its bytes and what it decodes to.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.kernels import Array

MOST_LEVELS = 255


@dataclass(frozen=True, eq=False)
class Whole:
    """A tensor, kept to the bit.

    `exact`: entropy-coded where that is shorter; else as it is, aligned so that it can be mapped into memory.
    """

    tensor: Tensor
    exact: bool = True

    def dense(self) -> Tensor:
        """The tensor."""
        return self.tensor


@dataclass(frozen=True, eq=False)
class Shared:
    """A float32 tensor of few values: weight = values[symbol].

    Attributes:
        symbols: uint8, of the tensor's shape; in a pruned tensor 0 is a weight that is gone.
        values: float32, one for each symbol; in a pruned tensor values[0] is 0.
        masked: zeros are pruned weights, and many.
        step: the values are step · (symbol − offset), and only step and offset are written.
        offset: see step.
    """

    symbols: Array
    values: Array
    masked: bool = True
    step: float | None = None
    offset: int = 0

    def __post_init__(self) -> None:
        if not 1 <= self.values.size <= MOST_LEVELS + 1:
            raise BadInput(f"a tensor shares 1 to {MOST_LEVELS + 1} values, got {self.values.size}")
        if self.masked and self.values[0] != 0:
            raise BadInput("the first value of a pruned tensor is zero")

    @property
    def levels(self) -> int:
        """The largest symbol there may be."""
        return int(self.values.size) - 1

    @property
    def density(self) -> float:
        """The share of weights that are kept."""
        return float(np.count_nonzero(self.values[self.symbols])) / max(1, self.symbols.size)

    def dense(self) -> Tensor:
        """The tensor."""
        return torch.from_numpy(np.asarray(self.values[self.symbols]))  # of one symbol NumPy gives a number


Part = Whole | Shared


def half(values: Array) -> Array:
    """Values as float16 holds them, as float32; those too large or too small for it stay as they are.

    A codebook of a file is written in float16: centroids are means of weights, and no more exact than that. Values are
    too small where rounding moves one by more than 2⁻¹⁰ of the largest.
    """
    with np.errstate(over="ignore"):
        rounded = values.astype(np.float16).astype(np.float32)
    exact = values.astype(np.float32)
    fits = np.isfinite(rounded).all() and (np.abs(rounded - exact) <= np.abs(exact).max(initial=0.0) / 1024).all()
    return rounded if fits else exact


def uniform(tensor: Tensor, bits: int) -> Part:
    """Biases and other small tensors in evenly spaced values, one of which is zero.

    What is empty, not finite or not float32 stays whole, and so does everything for 32 bits.

    >>> uniform(torch.tensor([0.75, 0.0]), 2).dense().tolist()
    [0.75, 0.0]
    """
    flat = tensor.detach().float()
    if not 2 <= bits <= 8 or tensor.dtype != torch.float32 or not tensor.numel() or not bool(flat.isfinite().all()):
        return Whole(tensor)
    least, most = min(0.0, float(flat.min())), max(0.0, float(flat.max()))
    step = float(np.float32((most - least) / ((1 << bits) - 1)))
    if step == 0:
        return Shared(np.zeros(tuple(tensor.shape), np.uint8), np.zeros(1, np.float32), masked=True)
    offset = min((1 << bits) - 1, max(0, round(-least / step)))
    symbols = (flat / step).round().add(offset).clamp(0, (1 << bits) - 1)
    return linear(symbols.to(torch.uint8).numpy(), step, offset, bits)


def linear(symbols: Array, step: float, offset: int, bits: int) -> Shared:
    """Evenly spaced values, as the file gives them back."""
    values = (np.arange(1 << bits, dtype=np.float32) - np.float32(offset)) * np.float32(step)
    return Shared(symbols, values, masked=False, step=step, offset=offset)
