"""AdaComp: in every bin, the elements that the latest gradient could lift to the bin's maximum."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, no_type_check

import numpy as np
import torch

from laconic.codecs import threads
from laconic.codecs.base import register
from laconic.codecs.selector import raise_non_finite
from laconic.codecs.threshold import SignSelector
from laconic.errors import BadInput, UnknownName
from laconic.kernels import Array, njit


@register("adacomp")
@dataclass(frozen=True)
class AdaComp(SignSelector):
    """Sends sign(Gᵢ)·s for the elements of every bin whose |Hᵢ| reaches the bin's maximum of |G|.

    G = R + ∇ is the residual after the new gradient ∇ was added, H = G + ∇ looks one such step ahead; with
    g_b = max |Gᵢ| over bin b, the elements with |Hᵢ| ≥ g_b > 0 and Gᵢ ≠ 0 are sent, all with one scale s: the mean of
    |Gᵢ| over what is sent, or of g_b over the bins. How many are sent thus adjusts itself to how active a bin is.

    `encode_feedback(x, residual)` has ∇ = x and R = residual before the call, as in the paper. `encode(x)` has no
    residual: G = x and H = 2x, so it sends what lies within a factor 2 of its bin's maximum. As H depends on G and ∇
    apart, feedback is *not* the same as encoding the sum; what holds is residual_after + sent = residual_before + x.

    Cost: 1 + 2 + log₂(n/k) bits for each of the k selected of n, and 28 bytes; two passes. The size varies.

    Args:
        bin: elements per bin, up to 2³¹; the paper takes 50 for convolutions and 500 for other layers.
        scale: `sent` for the mean of what is sent, which contracts; `bins` for the paper's mean of g_b, which can
            exceed what it stands for where the bins of a tensor differ in scale.

    >>> import torch
    >>> codec = AdaComp(2)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 0.2, -3.0, 2.0])), 4).tolist()
    [2.0, 0.0, -2.0, 2.0]

    Source: Chen et al., AdaComp: adaptive residual gradient compression for data-parallel distributed training,
    AAAI 2018.
    Differs: scale=sent by default; packed indices instead of 8 or 16 bits each; zeros are never sent.
    """

    bin: int = 500
    scale: str = "sent"

    examples: ClassVar[tuple[str, ...]] = ("adacomp(50)", "adacomp")
    source: ClassVar[str] = "AdaComp (Chen et al. 2018)"
    summary: ClassVar[str] = "per bin, what the latest gradient can lift to the bin's maximum: an index and one bit"

    def __post_init__(self) -> None:
        if isinstance(self.bin, bool) or not isinstance(self.bin, int) or not 1 <= self.bin < 1 << 31:
            raise BadInput(f"adacomp: bin must be a whole number from 1 to 2³¹, got {self.bin!r}")
        if self.scale not in ("sent", "bins"):
            raise UnknownName("scale of adacomp", str(self.scale), ("sent", "bins"))

    def choose(self, array: Array, add: Array | None, step: int) -> Array:
        if add is None:
            return self._select(array, array)
        torch.from_numpy(array).add_(torch.from_numpy(add))
        return self._select(array, add)

    def scales(self, array: Array, values: Array) -> Array:
        return np.array([_mean(np.abs(values) if self.scale == "sent" else self._maxima(array))], np.float32)

    def _maxima(self, array: Array) -> Array:
        maxima = np.empty(-(-array.size // self.bin), np.float32)

        def part(start: int, stop: int) -> None:
            _maxima(array[start:stop], self.bin, maxima[start // self.bin :])

        threads.run(part, array.size, align=self.bin)
        return maxima

    def _select(self, total: Array, latest: Array) -> Array:
        maxima = self._maxima(total)
        if not np.isfinite(maxima).all():
            raise_non_finite(total, self)

        def part(start: int, stop: int) -> Array:
            found = np.empty(stop - start + 1, np.int64)
            count = _select(total[start:stop], latest[start:stop], self.bin, maxima[start // self.bin :], found)
            return found[:count] + start

        return np.concatenate(threads.run(part, total.size, align=self.bin))


@njit(nogil=True, cache=True)
def _maxima(array: Array, bin: int, maxima: Array) -> None:
    """The largest magnitude of each bin; compared as bits, so that NaN comes out as NaN."""
    for b in range(-(-array.size // bin)):
        words = array[b * bin : (b + 1) * bin].view(np.int32)
        top = np.int32(0)
        for i in range(words.size):
            top = max(top, words[i] & np.int32(0x7FFFFFFF))
        maxima[b : b + 1].view(np.int32)[0] = top


@njit(nogil=True, cache=True)
def _mean(magnitudes: Array) -> float:
    """In float64 and in order, so that it does not depend on how NumPy sums."""
    total = 0.0
    for i in range(magnitudes.size):
        total += np.float64(magnitudes[i])
    return total / max(1, magnitudes.size)


@njit(nogil=True, cache=True)
@no_type_check
def _select(total: Array, latest: Array, bin: int, maxima: Array, found: Array) -> int:
    count = 0
    for b in range(-(-total.size // bin)):
        bound = maxima[b]
        if bound == 0:
            continue
        for i in range(b * bin, min(total.size, (b + 1) * bin)):
            ahead = np.float32(total[i] + latest[i])
            found[count] = i
            count += np.int64((abs(ahead) >= bound) & (total[i] != 0))
    return count
