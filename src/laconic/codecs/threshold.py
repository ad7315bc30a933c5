"""Every element beyond a fixed threshold, as its index and one sign bit; and what such selectors share."""

from __future__ import annotations

import math
import sys
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.codecs.base import register
from laconic.codecs.selector import MAGNITUDE, Selector, collect
from laconic.errors import BadInput, PayloadError
from laconic.kernels import Array


class SignSelector(Selector):
    """Sends float32 scales, one or one for each sign, and a bit per element, set where it is negative."""

    scale_count: ClassVar[int] = 1

    @abstractmethod
    def scales(self, array: Array, values: Array) -> Array:
        """The magnitudes to send for the `values` chosen of `array`, that of negative ones last."""

    def values_nbytes(self, count: int) -> int:
        return 4 * self.scale_count + -(-count // 8)

    def pack_values(self, array: Array, chosen: Array, step: int, out: Array) -> int:
        values = self.gather(array, chosen)
        nbytes, start = self.values_nbytes(chosen.size), 4 * self.scale_count
        out[:start] = self.scales(array, values).view(np.uint8)
        out[start:nbytes] = np.packbits(values < 0, bitorder="little")
        return nbytes

    def unpack_values(self, section: Array, count: int) -> Array:
        self.check_section(section, self.values_nbytes(count), count)
        scales = section[: 4 * self.scale_count].copy().view(np.float32)
        if not (np.isfinite(scales).all() and (scales >= 0).all()):
            raise PayloadError(f"{self}: the payload's scales {scales.tolist()} are not finite magnitudes")
        negative = np.unpackbits(section[4 * self.scale_count :], count=count, bitorder="little").astype(np.bool_)
        values: Array = np.where(negative, -scales[-1], scales[0])
        return values


@register("threshold")
@dataclass(frozen=True)
class Threshold(SignSelector):
    """Sends sign(xᵢ)·τ for every |xᵢ| > τ, nothing for the others.

    Meant for error feedback: what exceeds ±τ stays in the residual and is sent in later steps.

    Cost: 1 + 2 + log₂(n/k) bits for each of the k selected of n (see indices.py), and 28 bytes; one pass. The size
    depends on the data. `threshold(t)+none` sends the values themselves.

    Args:
        t: the threshold τ, a finite float32 above 0, on the scale of the gradients.

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

    def choose(self, array: Array, add: Array | None, step: int) -> Array:
        bound = int(np.float32(self.t).view(np.int32)) + 1  # the next larger float: |x| > t
        chosen = collect(array, self, bound, MAGNITUDE, add=add)
        return np.empty(0, np.int64) if chosen is None else chosen

    def scales(self, array: Array, values: Array) -> Array:
        return np.array([self.t], np.float32)

    def unpack_values(self, section: Array, count: int) -> Array:
        values = super().unpack_values(section, count)
        (t,) = section[:4].copy().view(np.float32)
        if t != np.float32(self.t):
            raise PayloadError(f"{self}: the payload was encoded with threshold {t}")
        return values
