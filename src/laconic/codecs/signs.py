"""One bit per value and one or two float32 per bucket: `onebit` and `sign`.

Body: the buckets' values (float32), then the sign bits of each bucket packed as in `planes.py`; a bit is 1 where x < 0
(so −0 counts as 0). A value decodes to its bucket's `above` if its bit is 0, to its `below` if it is 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.codecs import planes, threads
from laconic.codecs.base import register
from laconic.codecs.kernel import Bucketed
from laconic.errors import PayloadError
from laconic.kernels import Array, njit

PLACES = 32
GROUP = planes.GROUP_WORDS * PLACES


@dataclass(frozen=True)
class SignCodec(Bucketed):
    """Base of codecs that send sign bits; subclasses say how many values a bucket has and how they are found."""

    bucket: int | None = 2048

    coarse: ClassVar[bool] = True

    @property
    def places(self) -> int:
        return PLACES

    @property
    def _two(self) -> bool:
        return self.scales_per_bucket == 2

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        scales, words = self.parts(body, v.size)
        if self.bucket is None:
            finite = self._encode_whole(x, v, scales, words)
        else:
            bucket = self.bucket
            bad = threads.run(
                lambda start, stop: _encode(x, v, x is not v, bucket, self._two, start, stop, scales, words),
                v.size,
                align=bucket,
            )
            finite = not any(bad)
        if not finite:
            self.refuse(v)

    def _encode_whole(self, x: Array, v: Array, scales: Array, words: Array) -> bool:
        """One bucket: bits and chunk sums in one pass, the sums added in order; returns whether all is finite."""
        if not v.size:
            return True
        sums = np.zeros((3, -(-v.size // planes.CHUNK)))
        threads.run(
            lambda start, stop: _scan_chunks(x, v, x is not v, self._two, start, stop, words, sums),
            v.size,
            align=planes.CHUNK,
        )
        above, below, count_below = np.add.accumulate(sums, axis=1)[:, -1]
        if not np.isfinite(above - below):
            return False
        _means(above, below, int(count_below), v.size, self._two, scales, 0)
        if x is not v:
            self._unpack(-scales, words, v, True)
        return True

    def check_body(self, body: Array, numel: int) -> None:
        scales, _ = self.parts(body, numel)
        if not np.isfinite(scales).all():
            raise PayloadError(f"{self}: a payload's reconstruction value is not finite")

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        scales, words = self.parts(body, out.size)
        self._unpack(scales, words, out, add)

    def _unpack(self, scales: Array, words: Array, out: Array, add: bool) -> None:
        bucket = self.bucket or planes.CHUNK
        threads.run(
            lambda start, stop: _decode(scales, words, out, add, bucket, self.bucket is None, self._two, start, stop),
            out.size,
            align=bucket,
        )


@register("onebit")
@dataclass(frozen=True)
class OneBit(SignCodec):
    """Send the sign of each value; decode to the mean of the values of that sign in its bucket.

    For a bucket B (`bucket` consecutive values): above = mean{xᵢ : i ∈ B, xᵢ ≥ 0}, below = mean{xᵢ : i ∈ B, xᵢ < 0},
    0 where there is none; xᵢ decodes to above or below. Given the signs, no other two values have a smaller squared
    error: ‖x − C(x)‖² = ‖x‖² − Σ (n₊·above² + n₋·below²). Biased: meant for `encode_feedback`, which is fused.

    Cost: 1 bit per value and 64 bits per bucket: 1.25 bits at the default bucket of 256, which on MNIST ended half a
    point nearer to float32 than 2048 did. Sums are float64 in a fixed order (`planes.py`). One pass
    over memory.

    Args:
        bucket: values per pair of means, a multiple of 32, or none for the whole tensor.

    >>> import torch
    >>> codec = OneBit(bucket=32)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 3.0, -1.0, -5.0])), 4)
    tensor([ 2.,  2., -3., -3.])

    Source: Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014.
    Differs: the paper's columns of a weight matrix are buckets of a flat vector here.
    """

    bucket: int | None = 256

    source: ClassVar[str] = "Seide et al., 1-Bit Stochastic Gradient Descent, Interspeech 2014"
    summary: ClassVar[str] = "sign bits, and the means of both sides per bucket"
    examples: ClassVar[tuple[str, ...]] = ("onebit", "onebit(64)", "onebit(none)")
    scales_per_bucket: ClassVar[int] = 2


@register("sign")
@dataclass(frozen=True)
class Sign(SignCodec):
    """Send the sign of each value; decode to ± the mean magnitude of its bucket.

    C(x)ᵢ = ±s with s = ‖x_B‖₁ / |B| over the `bucket` values of B; zero and −0 decode to +s. A contraction:
    ‖x − C(x)‖² = ‖x‖² − Σ_B ‖x_B‖₁²/|B| ≤ (1 − 1/|B|)·‖x‖², which is what error feedback needs. Biased.

    Cost: 1 bit per value and 32 bits per bucket: 1.015625 bits at the default bucket of 2048. Sums are float64 in a
    fixed order (`planes.py`). One pass over memory.

    Args:
        bucket: values per scale, a multiple of 32, or none for the whole tensor.

    >>> import torch
    >>> codec = Sign(bucket=None)
    >>> codec.decode(codec.encode(torch.tensor([1.0, -2.0, 3.0])), 3)
    tensor([ 2., -2.,  2.])

    Source: Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019, Alg. 1; signs alone: Bernstein et al.,
    signSGD, ICML 2018.
    Differs: a scale per bucket unless bucket is none; sign(0) = +1, so that a bit is enough.
    """

    source: ClassVar[str] = "Karimireddy et al., Error Feedback Fixes SignSGD, ICML 2019"
    summary: ClassVar[str] = "sign bits, and the mean magnitude per bucket"
    examples: ClassVar[tuple[str, ...]] = ("sign", "sign(64)", "sign(none)")


@njit(nogil=True, cache=True)
def _means(above: float, below: float, count_below: int, count: int, two: bool, scales: Array, bucket: int) -> None:
    """Write a bucket's float32 values from the float64 sums of `_scan`; the mean of no values is 0."""
    if two:
        count_above = count - count_below
        scales[2 * bucket] = np.float32(above / count_above) if count_above else np.float32(0)
        scales[2 * bucket + 1] = np.float32(below / count_below) if count_below else np.float32(0)
    else:
        scales[bucket] = np.float32(above / count)


@njit(nogil=True, cache=True)
def _scan(
    x: Array, v: Array, feedback: bool, two: bool, lo: int, hi: int, words: Array, lanes: Array, others: Array
) -> tuple[float, float, int]:
    """v += x if there is feedback; write the sign bits; returns two sums and how many values are below zero.

    The sums are Σ max(v, 0) and Σ min(v, 0), each side on its own so that neither drowns in the other; for one value
    per bucket Σ |v| and 0. Their difference is not finite if and only if a value is not.
    """
    if feedback:
        planes.add(x, v, lo, hi)
    _pack(v, lo, hi, words)
    count_below = planes.popcount(words, lo // PLACES, (hi + PLACES - 1) // PLACES)
    if two:
        above, below = planes.sum_sides(v, lo, hi, lanes, others)
        return above, below, count_below
    return planes.sum_magnitudes(v, lo, hi, lanes), 0.0, count_below


@njit(nogil=True, cache=True)
def _scan_chunks(
    x: Array, v: Array, feedback: bool, two: bool, start: int, stop: int, words: Array, sums: Array
) -> None:
    lanes, others = np.empty(planes.LANES), np.empty(planes.LANES)
    for lo in range(start, stop, planes.CHUNK):
        chunk = lo // planes.CHUNK
        hi = min(lo + planes.CHUNK, stop)
        sums[0, chunk], sums[1, chunk], sums[2, chunk] = _scan(x, v, feedback, two, lo, hi, words, lanes, others)


@njit(nogil=True, cache=True)
def _pack(v: Array, lo: int, hi: int, words: Array) -> None:
    """The sign bits of v[lo:hi] into the words from lo / 32 on."""
    for start in range(lo, hi, GROUP):
        count = min(GROUP, hi - start)
        width = (count + PLACES - 1) // PLACES
        w = np.uint64(start // PLACES)
        for j in range(width):
            words[w + np.uint64(j)] = 0
        for place in range((count + width - 1) // width):
            first = start + place * width
            bit = np.uint32(1 << place)
            for j in range(min(width, start + count - first)):
                below = v[np.uint64(first) + np.uint64(j)] < np.float32(0)
                words[w + np.uint64(j)] |= bit if below else np.uint32(0)


@njit(nogil=True, cache=True)
def _unpack(words: Array, above: float, below: float, add: bool, out: Array, lo: int, hi: int) -> None:
    """out[lo:hi] = (out +) above or below, as the bits say."""
    for start in range(lo, hi, GROUP):
        count = min(GROUP, hi - start)
        width = (count + PLACES - 1) // PLACES
        w = np.uint64(start // PLACES)
        for place in range((count + width - 1) // width):
            first = start + place * width
            bit = np.uint32(1 << place)
            for j in range(min(width, start + count - first)):
                i = np.uint64(first) + np.uint64(j)
                value = below if words[w + np.uint64(j)] & bit else above
                out[i] = out[i] + value if add else value


@njit(nogil=True, cache=True)
def _values(scales: Array, bucket: int, two: bool) -> tuple[float, float]:
    if two:
        return scales[2 * bucket], scales[2 * bucket + 1]
    return scales[bucket], -scales[bucket]


@njit(nogil=True, cache=True)
def _encode(
    x: Array, v: Array, feedback: bool, bucket: int, two: bool, start: int, stop: int, scales: Array, words: Array
) -> int:
    """Buckets of start … stop, each while it is in cache; returns how many buckets are not finite."""
    lanes, others = np.empty(planes.LANES), np.empty(planes.LANES)
    bad = 0
    for lo in range(start, stop, bucket):
        hi = min(lo + bucket, stop)
        b = lo // bucket
        above, below, count_below = _scan(x, v, feedback, two, lo, hi, words, lanes, others)
        if not np.isfinite(above - below):
            bad += 1
            continue
        _means(above, below, count_below, hi - lo, two, scales, b)
        if feedback:
            high, low = _values(scales, b, two)
            _unpack(words, -high, -low, True, v, lo, hi)
    return bad


@njit(nogil=True, cache=True)
def _decode(
    scales: Array, words: Array, out: Array, add: bool, bucket: int, whole: bool, two: bool, start: int, stop: int
) -> None:
    for lo in range(start, stop, bucket):
        high, low = _values(scales, 0 if whole else lo // bucket, two)
        _unpack(words, high, low, add, out, lo, min(lo + bucket, stop))
