"""The k elements of largest magnitude, exactly, of the whole tensor or of every bucket."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, no_type_check

import numpy as np

from laconic.codecs import threads
from laconic.codecs.base import Codec, register
from laconic.codecs.selector import MAGNITUDE, Selector, collect, raise_non_finite
from laconic.errors import BadInput
from laconic.kernels import Array, njit

_LINE = 16  # floats of a cache line: a sample costs one miss per line
_LINES = 1024  # 16,384 sampled elements: quick to partition; they let through about twice k at 1 %
_ALL = 0x7FFFFFFF
_BIN_BITS = 19  # of a key, below what a bin of the histogram holds: 4,096 bins, 16 an octave


@register("topk")
@dataclass(frozen=True)
class TopK(Selector):
    """Sends the k elements of largest |xᵢ| with their float32 values; ties go to the lower index.

    k = max(1, round(fraction · n)) of n = numel elements, or of the n elements of every bucket (the last may be
    shorter). A whole number is k itself, at most n: `topk(16, bucket=512)` sends 16 of every 512.
    Contraction: ‖x − decode(encode(x))‖² ≤ (1 − k/n) ‖x‖².

    Cost: 32 + 2 + log₂(n/k) bits per selected element (see indices.py), 8.56 + 32 at 1 %, and 24 bytes. One pass
    that collects above a threshold estimated from a sample, and an exact selection among the few collected; when the
    sample misleads, a histogram of all keys and a second pass.

    Args:
        fraction: the share of elements, in (0, 1), or a whole number of them.
        bucket: select within every `bucket` consecutive elements, not over the whole tensor.

    >>> import torch
    >>> codec = TopK(2)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -3.0, 0.5, 2.0])), 4).tolist()
    [0.0, -3.0, 0.0, 2.0]

    Source: Aji & Heafield, Sparse communication for distributed gradient descent, EMNLP 2017; Renggli et al., SparCML,
    SC 2019 (buckets).
    Differs: exact, where many estimate the threshold from a sample.
    """

    fraction: float = 0.01
    bucket: int | None = None

    examples: ClassVar[tuple[str, ...]] = ("topk", "topk(0.3)", "topk(3)", "topk(16, bucket=512)", "topk(0.1, 50)")
    fixed_size: ClassVar[bool] = True
    source: ClassVar[str] = "Aji & Heafield 2017; SparCML (Renggli et al. 2019)"
    summary: ClassVar[str] = "the k largest magnitudes, exactly, of the tensor or of every bucket"

    def __post_init__(self) -> None:
        check_fraction("topk", self.fraction, whole=True)
        if self.bucket is not None and (isinstance(self.bucket, bool) or not isinstance(self.bucket, int)):
            raise BadInput(f"topk: bucket must be a whole number or none, got {self.bucket}")
        least = self.fraction if self.fraction >= 1 else 1
        if self.bucket is not None and not least <= self.bucket < 1 << 31:
            raise BadInput(f"topk: bucket must be at least {least} and below 2³¹, got {self.bucket}")

    def max_count(self, numel: int) -> int:
        if self.bucket is None:
            return share(self.fraction, numel)
        whole, rest = divmod(numel, self.bucket)
        return whole * share(self.fraction, self.bucket) + share(self.fraction, rest)

    def choose(self, array: Array, add: Array | None, step: int) -> Array:
        if self.bucket is None:
            return largest(array, share(self.fraction, array.size), self, add=add)
        if add is not None:
            array += add
        return self._select_buckets(array, self.bucket)

    def _select_buckets(self, array: Array, bucket: int) -> Array:
        k = share(self.fraction, bucket)
        chosen = np.empty(self.max_count(array.size), np.int64)
        words = array.view(np.int32)

        def part(start: int, stop: int) -> bool:
            last = share(self.fraction, stop % bucket)
            return bool(_select_buckets(words, start, stop, bucket, k, last, chosen[start // bucket * k :]))

        if not all(threads.run(part, array.size, align=bucket)):
            raise_non_finite(array, self)
        return chosen


def check_fraction(name: str, fraction: float, *, whole: bool = False) -> None:
    """Raise BadInput unless `fraction` lies in (0, 1), or is a whole number where allowed."""
    number = isinstance(fraction, int | float) and not isinstance(fraction, bool)
    if number and (0 < fraction < 1 or (whole and isinstance(fraction, int) and fraction >= 1)):
        return
    also = ", or be a whole number of elements" if whole else ""
    raise BadInput(f"{name}: fraction must lie between 0 and 1{also}, got {fraction!r}")


def share(fraction: float, numel: int) -> int:
    """k of `numel` elements: max(1, round(fraction·numel)), or the whole number given; never more than `numel`."""
    return min(numel, int(fraction) if fraction >= 1 else max(1, round(fraction * numel)))


def largest(
    array: Array, k: int, codec: Codec, *, add: Array | None = None, keys: tuple[int, int] = MAGNITUDE
) -> Array:
    """The sorted indices of the `k` largest keys of `array`, ties to the lower index; first array += add when given.

    `keys` says what is compared, see `selector.collect`; 0 ≤ k ≤ array.size.
    """
    bound = _estimate(array, add, k, keys)
    limit = 8 * k + (1 << 16)
    chosen = collect(array, codec, bound, keys, add=add, limit=limit)
    if chosen is None or chosen.size < k:  # the sample misled
        chosen = collect(array, codec, _histogram_bound(array, k, *map(np.int32, keys)), keys, limit=limit)
    if chosen is not None and chosen.size < k and keys == MAGNITUDE:  # the others are zeros
        kept = np.empty(k, np.int64)
        _fill_up(chosen, kept)
        return kept
    if chosen is None or chosen.size < k:  # most keys are equal
        chosen = np.arange(array.size)
    return _trim(chosen, _keys(array[chosen], keys), k)


def _keys(array: Array, keys: tuple[int, int]) -> Array:
    """What is compared, see `selector.collect`."""
    words: Array = (array.view(np.int32) & np.int32(keys[0])) ^ np.int32(keys[1])
    return words


def _estimate(array: Array, add: Array | None, k: int, keys: tuple[int, int]) -> int:
    """A key that about k keys, and almost surely no fewer, reach: from a line at a random place of every stride.

    Neighbours are alike (a row of a weight's gradient shares its δ), so the lines, not their elements, are taken to be
    independent: the margin is 4σ of that. At even distances they would meet the same few columns of a matrix.
    """
    if k == 0 or array.size == 0:
        return _ALL
    lines = min(_LINES, -(-array.size // _LINE))
    words = _keys(_sample(array, array if add is None else add, add is not None, lines), keys)
    expected = words.size * k / array.size
    rank = min(words.size, math.ceil(expected + 4 * math.sqrt(_LINE * expected) + 4))
    # Key 0 stands for zeros: never collect those here.
    return max(1, int(np.partition(words, words.size - rank)[words.size - rank]))


def _trim(chosen: Array, words: Array, k: int) -> Array:
    """The k of `chosen` with the largest keys `words`, ties to the first."""
    if chosen.size == k:
        return chosen
    if k == 0:
        return chosen[:0]
    bound = np.partition(words, words.size - k)[words.size - k]
    ties = k - int(np.count_nonzero(words > bound))
    kept = np.empty(k, np.int64)
    _keep(chosen, words, bound, ties, kept)
    return kept


@njit(nogil=True, cache=True)
def _keep(chosen: Array, words: Array, bound: int, ties: int, kept: Array) -> None:
    size = 0
    for j in range(chosen.size):
        tie = words[j] == bound
        if words[j] > bound or (tie and ties > 0):
            kept[size] = chosen[j]
            size += 1
            ties -= tie


@njit(nogil=True, cache=True)
def _fill_up(chosen: Array, kept: Array) -> None:
    """Sorted `chosen` and, so that `kept` is full, the lowest indices that are not among them; sorted, too."""
    missing, at = kept.size - chosen.size, 0
    for size in range(kept.size):
        if missing > 0 and (at == chosen.size or chosen[at] > size):
            kept[size] = size
            missing -= 1
        else:
            kept[size] = chosen[at]
            at += 1


@njit(nogil=True, cache=True)
@no_type_check
def _sample(array: Array, add: Array, adds: bool, lines: int) -> Array:
    sample = np.empty(lines * _LINE, np.float32)
    stride = array.size // lines
    state = np.uint32(1)
    size = 0
    for line in range(lines):
        state = np.uint32(state * np.uint32(1664525) + np.uint32(1013904223))
        first = line * stride + np.int64(np.uint64(state) * np.uint64(max(1, stride - _LINE + 1)) >> np.uint64(32))
        for i in range(first, min(array.size, first + _LINE)):
            sample[size] = array[i] + add[i] if adds else array[i]
            size += 1
    return sample[:size]


@njit(nogil=True, cache=True)
@no_type_check
def _histogram_bound(array: Array, k: int, mask: int, flip: int) -> int:
    """The largest multiple of 2¹⁹ that at least k keys reach; at least 1, as key 0 stands for zeros."""
    words = array.view(np.int32)
    counts = np.zeros((2, 1 << (31 - _BIN_BITS)), np.int64)  # two, so that equal neighbours do not wait for each other
    for i in range(words.size):
        key = (words[i] & mask) ^ flip
        counts[i & 1, max(key, np.int32(0)) >> np.int32(_BIN_BITS)] += 1
    reached = 0
    for place in range(counts.shape[1] - 1, 0, -1):
        reached += counts[0, place] + counts[1, place]
        if reached >= k:
            return place << _BIN_BITS
    return 1


@njit(nogil=True, cache=True)
@no_type_check
def _select_buckets(words: Array, start: int, stop: int, bucket: int, k: int, last: int, chosen: Array) -> bool:
    """Select in every bucket of start … stop; False if one holds a NaN or infinity."""
    magnitudes = np.empty(bucket, np.int32)
    found = np.empty(bucket + 1, np.int32)
    near = np.empty(bucket + 1, np.int32)
    bound = np.int32(0x3F800000)  # a first guess; each bucket starts from the one before
    size = 0
    for first in range(start, stop, bucket):
        part = words[first : min(stop, first + bucket)]
        wanted = k if part.size == bucket else last
        top = np.int32(0)
        for i in range(part.size):
            magnitudes[i] = part[i] & np.int32(0x7FFFFFFF)
            top = max(top, magnitudes[i])
        if top >= np.int32(0x7F800000):
            return False
        keys = magnitudes[: part.size]
        # A quarter of an octave below the last bucket's key, at least `wanted` should reach, and not many more.
        low = _bracket(keys, min(bound - (1 << 21), top), top, wanted, 4 * wanted)
        count = 0
        for i in range(keys.size):
            found[count] = i
            near[count] = keys[i]
            count += np.int64(keys[i] >= low)
        bound = _bracket(near[:count], low, top, wanted, wanted)
        # `bound` is the wanted-th key, or splits the wanted from the rest; surplus elements are ties of it.
        above = 0
        for j in range(count):
            above += np.int64(near[j] > bound)
        ties = wanted - above
        for j in range(count):
            tie = near[j] == bound
            if near[j] > bound or (tie and ties > 0):
                chosen[size] = first + found[j]
                size += 1
                ties -= np.int64(tie)
    return True


@njit(nogil=True, cache=True)
@no_type_check
def _bracket(keys: Array, guess: int, top: int, least: int, most: int) -> int:
    """A bound that at least `least` keys reach and at most `most`, or the least-th largest key itself."""
    low, high = np.int64(0), np.int64(top) + 1
    bound = np.int64(max(guess, 0))
    step = np.int64(1 << 22)
    while high - low > 1:
        reach = np.int32(0)
        probe = np.int32(bound)
        for i in range(keys.size):
            reach += np.int32(keys[i] >= probe)
        if reach >= least:
            low = bound
            if reach <= most:
                break
            bound = low + (high - low) // 2
        else:
            high = bound
            bound = max(bound - step, low + (high - low) // 2) if low == 0 else low + (high - low) // 2
            step *= 2
    return low
