"""k elements drawn by a generator that both ends share, so that no index is sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, no_type_check

import numpy as np

from laconic.codecs import random
from laconic.codecs.base import register
from laconic.codecs.selector import Selector, collect
from laconic.codecs.topk import check_fraction, share
from laconic.errors import BadInput, PayloadError
from laconic.kernels import Array, njit

_MOST = np.finfo(np.float32).max
_CHOOSING = 0x63686F6F73696E67  # the stream's number: "choosing" in ASCII
_ALL = 0x7FFFFFFF  # above every finite key: collect nothing, but check (and add) everything


@register("randomk")
@dataclass(frozen=True)
class RandomK(Selector):
    """Sends k elements chosen uniformly among all sets of k, anew at every step, with their float32 values.

    k = max(1, round(fraction · n)), or the whole number given. The set follows from (seed, step) alone: Floyd's
    sampling over counter-based draws, u₂ₜ and u₂ₜ₊₁ giving 53 bits for draw t, in a stream apart from that of a
    quantiser with the same seed. Ranks with the same seed and step choose the same elements, so their payloads can be
    added value by value.

    With `scaled`, values are multiplied by n/k: E[decode(encode(x))] = x, E‖decode − x‖² = (n/k − 1)‖x‖². Without it
    (the default, for error feedback) the codec is biased and contracts: E‖decode − x‖² = (1 − k/n)‖x‖².

    Cost: 32 bits per selected element and 32 bytes: the generator's key travels instead of indices. One pass to check x
    for NaN, n/8 bytes of scratch, O(k) draws.

    Args:
        fraction: the share of elements, in (0, 1), or a whole number of them.
        scaled: multiply by n/k (saturating at the largest float32), for an unbiased codec; not for error
            feedback.
        seed: the seed of the draws, the same on every rank.

    >>> import torch
    >>> codec = RandomK(0.5, seed=1)
    >>> torch.count_nonzero(codec.decode(codec.encode(torch.ones(8), step=3), 8)).item()
    4

    Source: Konečný et al., Federated learning: strategies for improving communication efficiency, 2016 (random mask);
    Stich et al., Sparsified SGD with memory, NeurIPS 2018; Bentley & Floyd, A sample of brilliance, CACM 1987.
    """

    fraction: float = 0.01
    scaled: bool = False
    seed: int = 0

    examples: ClassVar[tuple[str, ...]] = ("randomk", "randomk(0.4, seed=7)", "randomk(5)", "randomk(0.1, scaled=true)")
    fixed_size: ClassVar[bool] = True
    stochastic: ClassVar[bool] = True
    source: ClassVar[str] = "Konečný et al. 2016; Stich et al. 2018"
    summary: ClassVar[str] = "k elements at random by a shared seed, no indices sent; unbiased when scaled"

    def __post_init__(self) -> None:
        check_fraction("randomk", self.fraction, whole=True)
        if not isinstance(self.scaled, bool):
            raise BadInput(f"randomk: scaled must be true or false, got {self.scaled!r}")
        if isinstance(self.seed, bool) or not isinstance(self.seed, int):
            raise BadInput(f"randomk: seed must be a whole number, got {self.seed!r}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.scaled

    def max_count(self, numel: int) -> int:
        return share(self.fraction, numel)

    def choose(self, array: Array, add: Array | None, step: int) -> Array:
        collect(array, self, _ALL, (_ALL, 0), add=add)
        return draw(int(self._key(step)), array.size, share(self.fraction, array.size))

    def _key(self, step: int) -> np.uint64:
        return random.apart(random.key(self.seed, step), _CHOOSING)

    def gather(self, array: Array, chosen: Array) -> Array:
        values = super().gather(array, chosen)
        if self.scaled and chosen.size:
            with np.errstate(over="ignore"):
                values *= np.float32(array.size / chosen.size)
            np.clip(values, -_MOST, _MOST, out=values)
        return values

    def indices_nbytes(self, numel: int, count: int) -> int:
        return 8

    def pack_indices(self, chosen: Array, numel: int, step: int, out: Array) -> None:
        out[:] = np.array([self._key(step)], "<u8").view(np.uint8)

    def unpack_indices(self, section: Array, numel: int, count: int) -> Array:
        if count != share(self.fraction, numel):
            raise PayloadError(f"{self}: payload has {count} values, {share(self.fraction, numel)} are expected")
        return draw(int.from_bytes(section.tobytes(), "little"), numel, count)


def draw(key: int, numel: int, count: int) -> Array:
    """`count` distinct, sorted indices below `numel`, every such set equally likely over keys.

    Floyd's sampling: for t = 0 … count − 1 and j = numel − count + t, draw i uniformly from 0 … j; take i, or j where i
    was taken before. The bitmap that says so gives the sorted order at no cost.

    >>> draw(7, 5, 5).tolist()
    [0, 1, 2, 3, 4]
    """
    indices = np.empty(count, np.int64)
    _draw(np.uint64(key), numel, np.zeros(-(-numel // 64), np.uint64), indices)
    return indices


@njit(nogil=True, cache=True)
@no_type_check
def _draw(key: int, numel: int, taken: Array, indices: Array) -> None:
    one = np.uint64(1)
    for t in range(indices.size):
        last = numel - indices.size + t
        high = np.uint64(random.bits32(key, 2 * t))
        low = np.uint64(random.bits32(key, 2 * t + 1))
        uniform = np.float64((high << np.uint64(21)) | (low >> np.uint64(11))) * 2.0**-53
        i = min(np.int64(uniform * np.float64(last + 1)), last)
        if (taken[i >> 6] >> np.uint64(i & 63)) & one:
            i = last
        taken[i >> 6] |= one << np.uint64(i & 63)
    j = 0
    for w in range(taken.size):
        word = taken[w]
        i = 64 * w
        while word != 0:
            if word & one:
                indices[j] = i
                j += 1
            word >>= one
            i += 1
