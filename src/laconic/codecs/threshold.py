"""Every element beyond a fixed threshold, as its index and one sign bit."""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from torch import Tensor

from laconic.codecs import frame
from laconic.codecs.base import register
from laconic.codecs.selector import MAGNITUDE, Array, Selector, collect
from laconic.errors import BadInput, PayloadError


@register("threshold")
@dataclass(frozen=True)
class Threshold(Selector):
    """Sends sign(xᵢ)·τ for every |xᵢ| > τ, nothing for the others.

    Meant for error feedback: what exceeds ±τ stays in the residual and is sent in later steps.

    Cost: 1 + 2 + log₂(n/k) bits for each of the k selected of n (see indices.py), and 28 bytes; one pass. The size
    depends on the data. `threshold(t)+none` sends the values themselves.

    Args:
        t: the threshold τ, a finite float32 above 0, on the scale of the gradients.

    Raises:
        BadInput: t is not a positive finite float32.

    >>> import torch
    >>> codec = Threshold(0.5)
    >>> codec.decode(codec.encode(torch.tensor([0.1, -2.0, 0.5, 0.6])), 4).tolist()
    [0.0, -0.5, 0.0, 0.5]

    Source: Strom, Scalable distributed DNN training using commodity GPU cloud computing, Interspeech 2015.
    Differs: the index is packed in fewer than the paper's 31 bits; no second, entropy-coded stage (use `+entropy`).
    """

    t: float = 0.01

    examples: ClassVar[tuple[str, ...]] = ("threshold", "threshold(1.0)")
    source: ClassVar[str] = "Strom 2015"
    summary: ClassVar[str] = "±t for every element beyond a fixed threshold t: an index and one bit"

    def __post_init__(self) -> None:
        if isinstance(self.t, bool) or not isinstance(self.t, int | float):
            raise BadInput(f"threshold: t must be a number, got {self.t!r}")
        with np.errstate(over="ignore"):
            if not (0 < self.t <= sys.float_info.max and 0 < np.float32(self.t) < math.inf):
                raise BadInput(f"threshold: t must be a positive, finite float32, got {self.t}")

    def select(self, x: Tensor, *, step: int = 0) -> Array:
        return self._select(frame.floats(x, self), None)

    def select_feedback(self, x: Tensor, residual: Tensor, step: int) -> Array:
        return self._select(frame.floats(residual, self), frame.floats(x, self))

    def _select(self, array: Array, add: Array | None) -> Array:
        bound = int(np.float32(self.t).view(np.int32)) + 1  # the next larger float: |x| > t
        chosen = collect(array, self, bound, MAGNITUDE, add=add)
        return np.empty(0, np.int64) if chosen is None else chosen

    def values_nbytes(self, count: int) -> int:
        return 4 + -(-count // 8)

    def pack_values(self, array: Array, chosen: Array, step: int, out: Array) -> int:
        return pack_signs(self.gather(array, chosen), np.array([self.t], np.float32), out)

    def unpack_values(self, section: Array, count: int) -> Array:
        (t,), negative = unpack_signs(self, section, 1, count)
        if t != np.float32(self.t):
            raise PayloadError(f"{self}: the payload was encoded with threshold {t}")
        values: Array = np.where(negative, -t, t)
        return values


def pack_signs(values: Array, scales: Array, out: Array) -> int:
    """Write float32 `scales`, then a bit per value, set where it is negative; returns the bytes written."""
    bits = np.packbits(values < 0, bitorder="little")
    out[: scales.nbytes] = scales.view(np.uint8)
    out[scales.nbytes : scales.nbytes + bits.size] = bits
    return scales.nbytes + bits.size


def unpack_signs(codec: Selector, section: Array, scales: int, count: int) -> tuple[Array, Array]:
    """The scales and the bits that `pack_signs` wrote; scales are finite and ≥ 0, else PayloadError."""
    codec.check_section(section, 4 * scales + -(-count // 8), count)
    values = section[: 4 * scales].copy().view(np.float32)
    if not (np.isfinite(values).all() and (values >= 0).all()):
        raise PayloadError(f"{codec}: the payload's scales {values.tolist()} are not finite magnitudes")
    return values, np.unpackbits(section[4 * scales :], count=count, bitorder="little").astype(np.bool_)
