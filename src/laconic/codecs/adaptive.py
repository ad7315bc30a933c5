"""A fixed proportion of the positive and of the negative elements, each replaced by the mean of those sent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, no_type_check

import numpy as np
import torch

from laconic.codecs import threads
from laconic.codecs.base import register
from laconic.codecs.selector import NEGATIVE, POSITIVE, raise_non_finite
from laconic.codecs.threshold import SignSelector
from laconic.codecs.topk import check_fraction, largest, share
from laconic.kernels import Array, njit


@register("adaptive")
@dataclass(frozen=True)
class Adaptive(SignSelector):
    """Sends the largest π of the positive elements as their mean, and the largest π of the negative as theirs.

    With n₊ elements above zero, the k₊ = max(1, round(π·n₊)) largest (0 if n₊ = 0) are sent as
    μ₊ = Σ sent / k₊; likewise below zero. The thresholds τ₊, τ₋ thus follow the data, each sign by itself; zeros are
    never sent; ties at a threshold go to the lower index. Means are summed in float64, in the order of the indices.

    Cost: 1 + 2 + log₂(n/k) bits for each of the k = k₊ + k₋ selected of n, and 32 bytes; three passes (count the
    signs; collect each sign). The size depends on the data only through n₊ and n₋.

    Args:
        fraction: the proportion π, in (0, 1).

    >>> import torch
    >>> codec = Adaptive(0.5)
    >>> codec.decode(codec.encode(torch.tensor([4.0, 1.0, -1.0, 2.0, 1.0, 0.0])), 6).tolist()
    [3.0, 0.0, -1.0, 3.0, 0.0, 0.0]

    Source: Dryden et al., Communication quantization for data-parallel training of deep neural networks, MLHPC
    2016, §3.
    Differs: exact thresholds, where the paper samples on large layers; packed indices, where it entropy-codes gaps.
    """

    fraction: float = 0.01

    scale_count: ClassVar[int] = 2
    examples: ClassVar[tuple[str, ...]] = ("adaptive", "adaptive(0.3)")
    source: ClassVar[str] = "Dryden et al. 2016"
    summary: ClassVar[str] = "a fixed share of each sign, sent as the mean of what is sent: an index and one bit"

    def __post_init__(self) -> None:
        check_fraction("adaptive", self.fraction)

    def max_count(self, numel: int) -> int:
        # round and max(1, ·) can each favour both signs.
        return min(numel, share(self.fraction, numel) + 2)

    def choose(self, array: Array, add: Array | None, step: int) -> Array:
        if add is not None:
            torch.from_numpy(array).add_(torch.from_numpy(add))
        parts = threads.run(lambda start, stop: _count_signs(array[start:stop]), array.size)
        if not all(finite for _, _, finite in parts):
            raise_non_finite(array, self)
        positive, negative = sum(p for p, _, _ in parts), sum(n for _, n, _ in parts)
        above = largest(array, share(self.fraction, positive), self, keys=POSITIVE)
        below = largest(array, share(self.fraction, negative), self, keys=NEGATIVE)
        return np.sort(np.concatenate((above, below)))

    def scales(self, array: Array, values: Array) -> Array:
        means: Array = _means(values)
        return means


@njit(nogil=True, cache=True)
@no_type_check
def _count_signs(array: Array) -> tuple[int, int, bool]:
    words = array.view(np.int32)
    positive = negative = 0
    top = np.int32(0)
    for i in range(words.size):
        positive += np.int64(array[i] > 0)
        negative += np.int64(array[i] < 0)
        top = max(top, words[i] & np.int32(0x7FFFFFFF))
    return positive, negative, top < np.int32(0x7F800000)


@njit(nogil=True, cache=True)
def _means(values: Array) -> Array:
    """The mean magnitudes of the positive and of the negative values, 0 where there are none."""
    sums = np.zeros(2, np.float64)
    counts = np.zeros(2, np.int64)
    for j in range(values.size):
        sign = np.int64(values[j] < 0)
        sums[sign] += abs(np.float64(values[j]))
        counts[sign] += 1
    return (sums / np.maximum(counts, 1)).astype(np.float32)
