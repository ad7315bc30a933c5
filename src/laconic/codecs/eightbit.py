"""What the 8-bit codecs share: one scale per block, one byte per value.

Callers: `dynamic8`, `static8`, `mantissa8`, `fp8` (a table of levels) and `linear8` (arithmetic).

Body: the scales, float32, one per block; then the codes, one byte per value. A value decodes to level[code] · scale.
The scale is the block's largest magnitude, so every level lies in [−1, 1]. `block=None` is one block: the whole tensor.

Invariants: a block is read, scaled and quantised while it is in the first-level cache; a NaN or an infinity shows up
as a scale that is not finite, without a pass of its own; nothing overflows, from the smallest denormal to the largest
float. After a NonFiniteError from `encode_feedback` the residual holds residual + x where the bad block is, and what
was to be kept elsewhere.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar, NamedTuple

import numpy as np

from laconic.codecs import threads
from laconic.codecs.frame import HEADER_NBYTES, Array
from laconic.codecs.kernel import KernelCodec
from laconic.errors import BadInput
from laconic.kernels import njit

DEFAULT_BLOCK = 4096
CHUNK = 4096  # values at a time: with its scratch 64 KB, of which each loop touches half


class BlockScaled(KernelCodec):
    """One scale per `block` values and one byte per value: 8 + 32/block bits per element."""

    block: int | None

    def __post_init__(self) -> None:
        if self.block is not None and (type(self.block) is not int or self.block < 1):
            raise BadInput(f"{self.name}: block must be a positive number of values or none, got {self.block!r}")

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + 4 * self._blocks(numel) + numel

    def _fixed_scale(self) -> float | None:
        """The scale of everything, for a codec that does not scale by the largest magnitude."""
        return None

    @abstractmethod
    def _encode(self, x: Array, residual: Array, codes: Array, scales: Array, *options: Any) -> None:
        """Fill `codes`, and `scales` unless given; options: block, given, feedback, first index, step."""

    @abstractmethod
    def _decode(self, codes: Array, scales: Array, block: int, add: bool, out: Array) -> None:
        """out = level[code] · scale, or out += it."""

    def _blocks(self, numel: int) -> int:
        return min(numel, 1) if self._one_scale() else -(-numel // (self.block or 1))

    def _one_scale(self) -> bool:
        return self.block is None or self._fixed_scale() is not None

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        numel, feedback, given = v.size, x is not v, self._one_scale()
        scales = np.empty(self._blocks(numel), np.float32)
        codes = body[4 * scales.size :]
        if given and numel:
            prepare = (lambda a, b: accumulate(x[a:b], v[a:b])) if feedback else (lambda a, b: largest(x[a:b]))
            scales[0] = np.uint32(max(threads.run(prepare, numel))).view(np.float32)
            self._check_finite(scales, v)
            fixed = self._fixed_scale()
            scales[0] = scales[0] if fixed is None else fixed

        def kernel(a: int, b: int) -> None:
            part, block = self._scales_of(scales, a, b)
            self._encode(x[a:b], v[a:b], codes[a:b], part, block, given, feedback, a, step)

        threads.run(kernel, numel, align=CHUNK if given else self.block or 1)
        self._check_finite(scales, v)
        body[: 4 * scales.size] = scales.view(np.uint8)

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        count = self._blocks(out.size)
        scales = body[: 4 * count].copy().view(np.float32)  # aligned
        codes = body[4 * count :]
        if self.are_large(scales):
            self.check_decoded(lambda values: self._unpack(codes, scales, values, False), out.size)
        self._unpack(codes, scales, out, add)

    def _unpack(self, codes: Array, scales: Array, out: Array, add: bool) -> None:
        def kernel(a: int, b: int) -> None:
            part, block = self._scales_of(scales, a, b)
            self._decode(codes[a:b], part, block, add, out[a:b])

        threads.run(kernel, out.size, align=CHUNK if self._one_scale() else self.block or 1)

    def _scales_of(self, scales: Array, start: int, stop: int) -> tuple[Array, int]:
        """The scales of one aligned range, and how many of its values share one."""
        if self._one_scale() or self.block is None:
            return scales, max(1, stop - start)
        return scales[start // self.block : -(-stop // self.block)], self.block

    def _check_finite(self, scales: Array, v: Array) -> None:
        if not _are_scales(scales):
            self.refuse(v)


def check_offset(name: str, offset: int | None) -> None:
    """An exponent offset: None, or a whole number for which 15 · 10^offset and its inverse are float32."""
    if offset is not None and (type(offset) is not int or not -30 <= offset <= 30):
        raise BadInput(f"{name}: offset must be a whole number from -30 to 30, or none, got {offset!r}")


@njit(nogil=True, cache=True)
def _are_scales(scales: Array) -> bool:
    """Whether none is negative, infinite or NaN."""
    good = True
    for i in range(scales.size):
        good &= scales[i] >= 0 and scales[i] < np.inf
    return good


@njit(nogil=True, cache=True)
def largest(x: Array) -> np.uint32:
    """The bits of the largest magnitude; NaN and infinity are larger than any finite one."""
    top = np.uint32(0)
    for i in range(x.size):
        top = max(top, np.uint32(np.float32(x[i]).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    return top


@njit(nogil=True, cache=True)
def accumulate(x: Array, residual: Array) -> np.uint32:
    """residual += x; returns the bits of the largest magnitude."""
    top = np.uint32(0)
    for i in range(residual.size):
        value = np.float32(residual[i] + x[i])
        residual[i] = value
        top = max(top, np.uint32(np.float32(value).view(np.uint32) & np.uint32(0x7FFFFFFF)))
    return top


@njit(nogil=True, cache=True)
def power_for(scale: np.float32) -> np.float32:
    """A power of two p that brings a scale far from 1 to where 1/(scale · p) neither overflows nor is denormal."""
    if scale < np.float32(2.0**-100):
        return np.float32(2.0**64)
    if scale > np.float32(2.0**100):
        return np.float32(2.0**-64)
    return np.float32(1.0)


class Levels(NamedTuple):
    """A table of levels, ready for the kernels.

    `levels[code]` decodes. To encode v ≥ 0, its upper 15 bits choose a bucket that holds at most one threshold between
    levels; the bucket's entry is (the code at its start)·2¹⁷ + 2¹⁷ − (the threshold's lower 17 bits), so that adding
    v's lower bits and shifting gives the code: one load, no branch.
    """

    levels: Array  # 256 float32: the codes' values, sign bit on top
    entries: Array  # uint32 per bucket
    first: int  # the upper bits of the first bucket


def levels_table(positive: Sequence[float], *, ties_to_even: bool = False) -> Levels:
    """The tables for up to 128 ascending levels, from 0 to at most 1; the code is the position, the top bit the sign.

    v is given the nearest level; halfway, the larger one, or the even code. Codes past the last level decode as it.
    """
    ascending = np.asarray(positive, np.float64).astype(np.float32)
    padded = np.concatenate([ascending, np.full(128 - ascending.size, ascending[-1], np.float32)])
    middle = (ascending[:-1].astype(np.float64) + ascending[1:]) / 2
    threshold = middle.astype(np.float32)  # the smallest float32 that goes up
    tie_goes_up = np.arange(1, ascending.size) % 2 == 0 if ties_to_even else np.ones(middle.size, bool)
    below = (threshold < middle) | ((threshold == middle) & ~tie_goes_up)
    threshold = np.where(below, np.nextafter(threshold, np.float32(2)), threshold)
    bits = threshold.view(np.uint32).astype(np.int64)
    first = int(bits[0] >> 17) - 1
    starts = np.arange(first, (int(np.float32(1).view(np.uint32)) >> 17) + 1) << 17
    code = np.searchsorted(bits, starts)  # thresholds before the bucket
    inside = np.searchsorted(bits, starts + (1 << 17)) - code
    if inside.max() > 1:
        raise ValueError("two thresholds share a bucket: the levels are closer than 2⁻⁶ of their size")
    until = np.where(inside == 1, starts + (1 << 17) - bits[np.minimum(code, bits.size - 1)], 0)
    entries = ((code << 17) + until).astype(np.uint32)
    return Levels(np.concatenate([padded, -padded]), entries, first)


class Tabulated(BlockScaled):
    """A block-scaled codec whose levels are a table."""

    source: ClassVar[str] = "Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016"

    @abstractmethod
    def _levels(self) -> Levels:
        """The codec's table; cached by whoever makes it."""

    def _encode(self, x: Array, residual: Array, codes: Array, scales: Array, *options: Any) -> None:
        block, given, feedback, _, _ = options
        levels, entries, first = self._levels()
        words = _words(codes)
        _encode(x, residual, codes, words, scales, block, given, feedback, levels, entries, np.int32(first))

    def _decode(self, codes: Array, scales: Array, block: int, add: bool, out: Array) -> None:
        _decode(codes, _words(codes), scales, block, add, out, self._levels().levels)


def _words(codes: Array) -> Array:
    """The codes four by four, without those left over; a view."""
    return codes[: codes.size // 4 * 4].view("<u4")


@njit(nogil=True, cache=True)
def _encode(
    x: Array, residual: Array, codes: Array, words: Array, scales: Array, block: int, given: bool, feedback: bool,
    levels: Array, entries: Array, first: np.int32,
) -> None:  # fmt: skip
    bucket, entry = np.zeros(CHUNK, np.uint32), np.empty(CHUNK, np.uint32)
    pairs = bucket.view(np.uint64)
    scratch = np.empty(CHUNK, np.float32)
    for k in range(scales.size):
        start, stop = k * block, min((k + 1) * block, x.size)
        if not given:
            top = accumulate(x[start:stop], residual[start:stop]) if feedback else largest(x[start:stop])
            scales[k] = np.uint32(top).view(np.float32)
        scale = scales[k]
        if not scale < np.inf:
            continue
        power = power_for(scale)
        inverse = np.float32(np.float32(1) / np.float32(scale * power)) if scale > 0 else np.float32(0)
        for a in range(start, stop, CHUNK):
            b = min(a + CHUNK, stop)
            values = residual[a:b]
            if power != np.float32(1):
                _multiply(values, power, scratch)
                values = scratch[: b - a]
            _locate(values, inverse, first, np.int32(entries.size - 1), bucket)
            _look_up(pairs[: (b - a + 1) // 2], entries, entry)  # where b − a is odd, one left from before, too
            _finish(values, inverse, entry, codes[a:b])
            if feedback:
                _add(codes, words, a, b, levels, -scale, residual)


@njit(nogil=True, cache=True)
def _decode(codes: Array, words: Array, scales: Array, block: int, add: bool, out: Array, levels: Array) -> None:
    for k in range(scales.size):
        start, stop = k * block, min((k + 1) * block, codes.size)
        if add:
            _add(codes, words, start, stop, levels, scales[k], out)
        else:
            _set(codes, words, start, stop, levels, scales[k], out)


# Four codes are read as one word: with a load per code, or with the gather instruction, these two take half as long
# again. Numba compiles them a second time for words that are not aligned, as in a slice of a larger buffer.


@njit(nogil=True, cache=True)
def _add(
    codes: Array, words: Array, start: int, stop: int, levels: Array, scale: np.float32, out: Array
) -> None:
    """out[start:stop] += level[code] · scale; `words` are the codes, four by four."""
    whole = stop - (stop - start) % 4 if start % 4 == 0 else start
    for i in range(start // 4, whole // 4):
        word = words[np.uint64(i)]
        for place in range(4):
            level = levels[(word >> np.uint32(8 * place)) & np.uint32(0xFF)]
            out[np.uint64(4 * i + place)] += level * scale
    for i in range(whole, stop):
        out[np.uint64(i)] += levels[codes[np.uint64(i)]] * scale


@njit(nogil=True, cache=True)
def _set(
    codes: Array, words: Array, start: int, stop: int, levels: Array, scale: np.float32, out: Array
) -> None:
    """out[start:stop] = level[code] · scale; `words` are the codes, four by four."""
    whole = stop - (stop - start) % 4 if start % 4 == 0 else start
    for i in range(start // 4, whole // 4):
        word = words[np.uint64(i)]
        for place in range(4):
            level = levels[(word >> np.uint32(8 * place)) & np.uint32(0xFF)]
            out[np.uint64(4 * i + place)] = level * scale
    for i in range(whole, stop):
        out[np.uint64(i)] = levels[codes[np.uint64(i)]] * scale


# Each of these loops does one thing: LLVM vectorises those without a table, and the look-up takes two indices from one
# load. Together they take 0.8 ns per value, all in one loop 1.9.


@njit(nogil=True, cache=True)
def _locate(values: Array, inverse: np.float32, first: np.int32, last: np.int32, bucket: Array) -> None:
    for i in range(values.size):
        bits = np.float32(abs(values[i]) * inverse).view(np.int32)
        place = np.int32((bits >> np.int32(17)) - first)
        bucket[i] = np.uint32(min(max(place, np.int32(0)), last))


@njit(nogil=True, cache=True)
def _look_up(pairs: Array, table: Array, found: Array) -> None:
    for i in range(pairs.size):
        pair = pairs[i]
        found[np.uint64(2 * i)] = table[pair & np.uint64(0xFFFFFFFF)]
        found[np.uint64(2 * i + 1)] = table[pair >> np.uint64(32)]


@njit(nogil=True, cache=True)
def _finish(values: Array, inverse: np.float32, entry: Array, codes: Array) -> None:
    for i in range(codes.size):
        bits = np.float32(abs(values[i]) * inverse).view(np.uint32)
        code = np.uint32(np.uint32(entry[i] + np.uint32(bits & np.uint32(0x1FFFF))) >> np.uint32(17))
        sign = np.uint32((np.float32(values[i]).view(np.uint32) >> np.uint32(24)) & np.uint32(0x80))
        codes[i] = np.uint8(code | sign)


@njit(nogil=True, cache=True)
def _multiply(values: Array, factor: np.float32, out: Array) -> None:
    for i in range(values.size):
        out[i] = values[i] * factor
