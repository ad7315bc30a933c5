"""8-bit codecs whose levels are a table, and the three tables of the 8-bit paper: `dynamic8`, `static8`, `mantissa8`.

Callers: `fp8.py`, which has tables of its own. Blocks, scales and the body are those of `eightbit.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar, NamedTuple

import numpy as np
from torch import Tensor

from laconic.codecs import threads
from laconic.codecs.base import register
from laconic.codecs.eightbit import CHUNK, DEFAULT_BLOCK, BlockScaled, accumulate, largest, power_for
from laconic.codecs.frame import floats, unseal
from laconic.errors import BadInput
from laconic.kernels import Array, njit

LEAST_UPPER = 0.6  # of dynamic8: below, levels can lie closer than `levels_table` tells apart


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
    def table(self) -> Levels:
        """The codec's table; cached by whoever makes it."""

    def _encode(self, x: Array, residual: Array, codes: Array, scales: Array, *options: Any) -> None:
        block, given, feedback, _, _ = options
        levels, entries, first = self.table()
        words = _words(codes)
        _encode(x, residual, codes, words, scales, block, given, feedback, levels, entries, np.int32(first))

    def _decode(self, codes: Array, scales: Array, block: int, add: bool, out: Array) -> None:
        _decode(codes, _words(codes), scales, block, add, out, self.table().levels)

    def decode_mean(self, payloads: Sequence[Tensor], divisor: int, out: Tensor) -> None:
        """As `Codec.decode_mean`; one payload, or the mean of two, takes one pass: 0.6 of the time of three."""
        values, levels = floats(out, self), self.table().levels
        if len(payloads) > 2 or divisor & (divisor - 1):  # to divide by a power of two is to multiply by its inverse
            return super().decode_mean(payloads, divisor, out)
        bodies = [unseal(each, self.wire_name, values.size, nbytes=self.max_nbytes(values.size)) for each in payloads]
        found = [self.scales_and_codes(body, values.size) for body in bodies]
        if any(self.are_large(scales) for scales, _ in found):
            return super().decode_mean(payloads, divisor, out)

        def kernel(start: int, stop: int) -> None:
            rows = [(codes[start:stop], *self.scales_of(scales, start, stop)) for scales, codes in found]
            (a, one, block), (b, two, _), factor = rows[0], rows[-1], np.float32(1 / divisor)
            if len(rows) == 1:
                _part(a, _words(a), one, block, factor, values[start:stop], levels)
            else:
                _mean(a, b, _words(a), _words(b), one, two, block, factor, values[start:stop], levels)

        threads.run(kernel, values.size, align=self.align)
        return None


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
def _add(codes: Array, words: Array, start: int, stop: int, levels: Array, scale: np.float32, out: Array) -> None:
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
def _set(codes: Array, words: Array, start: int, stop: int, levels: Array, scale: np.float32, out: Array) -> None:
    """out[start:stop] = level[code] · scale; `words` are the codes, four by four."""
    whole = stop - (stop - start) % 4 if start % 4 == 0 else start
    for i in range(start // 4, whole // 4):
        word = words[np.uint64(i)]
        for place in range(4):
            level = levels[(word >> np.uint32(8 * place)) & np.uint32(0xFF)]
            out[np.uint64(4 * i + place)] = level * scale
    for i in range(whole, stop):
        out[np.uint64(i)] = levels[codes[np.uint64(i)]] * scale


@njit(nogil=True, cache=True)
def _mean(
    a: Array, b: Array, words_a: Array, words_b: Array, scales_a: Array, scales_b: Array, block: int,
    factor: np.float32, out: Array, levels: Array,
) -> None:  # fmt: skip
    """out = (level[a] · scale of a + level[b] · scale of b) · factor; the words are the codes, four by four."""
    for k in range(scales_a.size):
        start, stop = k * block, min((k + 1) * block, a.size)
        x, y = scales_a[k], scales_b[k]
        whole = stop - (stop - start) % 4 if start % 4 == 0 else start
        for i in range(start // 4, whole // 4):
            p, q = words_a[np.uint64(i)], words_b[np.uint64(i)]
            for place in range(4):
                left = levels[(p >> np.uint32(8 * place)) & np.uint32(0xFF)] * x
                right = levels[(q >> np.uint32(8 * place)) & np.uint32(0xFF)] * y
                out[np.uint64(4 * i + place)] = (left + right) * factor
        for i in range(whole, stop):
            out[np.uint64(i)] = (levels[a[np.uint64(i)]] * x + levels[b[np.uint64(i)]] * y) * factor


@njit(nogil=True, cache=True)
def _part(
    codes: Array, words: Array, scales: Array, block: int, factor: np.float32, out: Array, levels: Array
) -> None:  # fmt: skip
    """out = (level[code] · scale) · factor; the second product finds a chunk of values in the cache."""
    for k in range(scales.size):
        start, stop = k * block, min((k + 1) * block, codes.size)
        for a in range(start, stop, CHUNK):
            b = min(a + CHUNK, stop)
            _set(codes, words, a, b, levels, scales[k], out)
            _multiply(out[a:b], factor, out[a:b])


# Each of these loops does one thing: LLVM vectorises those without a table, and the look-up takes two indices from one
# load. Together they take 0.8 ns per value, all in one loop 1.9.


@njit(nogil=True, cache=True)
def _locate(values: Array, inverse: np.float32, first: np.int32, last: np.int32, bucket: Array) -> None:
    for i in range(values.size):
        bits = np.float32(abs(values[i]) * inverse).view(np.int32)
        place = np.int32((bits >> np.int32(17)) - first)
        place = place if place > np.int32(0) else np.int32(0)  # `max` and `min` take as long to compile as the loop
        bucket[i] = np.uint32(place if place < last else last)


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


@register("dynamic8")
@dataclass(frozen=True)
class Dynamic8(Tabulated):
    """Sends sign(x) · 10⁻ⁿ · t · scale: n leading zeros, a one, and 6 − n bits that choose t in (0.1, upper).

    The seven bits below the sign are 0ⁿ 1 b…b. The 2⁶⁻ⁿ values of t are the centres of the equal parts into which
    bisection cuts (0.1, upper): t = 0.1 + (upper − 0.1)(b + ½)/2⁶⁻ⁿ. Seven zeros are 0. The scale is the largest
    magnitude in each `block`; x/scale goes to the nearest of the 255 values, halfway to the one of larger magnitude.
    A zero stays zero, and the largest magnitude comes back 0.7 % small (0.9930).

    Cost: 8 + 32/block bits per element. Mean relative error on N(0, 1): 1.7 % in blocks of 4096, 1.9 % whole.

    Args:
        block: how many values share a scale; None, the whole tensor (as in the paper).
        upper: the upper end of the bisected interval, 0.6 to 1. 1 covers every value and is what the paper's text says
            and its Table 1 needs. Its two worked examples, 0.2345678 → 0.236719 and 0.0000234 → 0.000019, are those of
            0.8.

    >>> import torch
    >>> Dynamic8().decode(Dynamic8().encode(torch.tensor([0.0, 0.0312, -1.0])), 3)
    tensor([ 0.0000,  0.0311, -0.9930])

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §3.1.
    Differs: blocks, where the paper scales the whole tensor.
    """

    block: int | None = DEFAULT_BLOCK
    upper: float = 1.0

    summary: ClassVar[str] = "8-bit dynamic tree: decimal exponent in unary, bisection below it, scaled per block"
    examples: ClassVar[tuple[str, ...]] = ("dynamic8", "dynamic8(none)", "dynamic8(64)", "dynamic8(none, upper=0.8)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.upper) not in (int, float) or not LEAST_UPPER <= self.upper <= 1:
            raise BadInput(f"dynamic8: upper must lie between {LEAST_UPPER} and 1, got {self.upper!r}")

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of: codes of another `upper` mean other values."""
        return self.name if self.upper == 1 else f"{self.name}-{float(self.upper)}"

    def table(self) -> Levels:
        return _dynamic(float(self.upper))


@cache
def _dynamic(upper: float) -> Levels:
    levels = [0.0]
    for n in range(6, -1, -1):
        parts = 1 << (6 - n)
        levels += [(0.1 + (upper - 0.1) * (part + 0.5) / parts) / 10**n for part in range(parts)]
    return levels_table(levels)


class Offset(Tabulated):
    """A table scaled by the largest magnitude of each `block`, or for all values by `unit` · 10^offset."""

    offset: int | None
    unit: ClassVar[int] = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.offset is not None and (type(self.offset) is not int or not -30 <= self.offset <= 30):
            raise BadInput(f"{self.name}: offset must be a whole number from -30 to 30, or none, got {self.offset!r}")

    def fixed_scale(self) -> float | None:
        return None if self.offset is None else self.unit * 10.0**self.offset


@register("static8")
@dataclass(frozen=True)
class Static8(Offset):
    """Sends sign(x) · 10⁻ⁿ · t · scale, n in 0 … 7, t one of the 16 centres of the equal parts of (0.1, 1).

    The seven bits below the sign are 7 − n in three and b in four, t = 0.1 + 0.9(b + ½)/16. x/scale goes to the
    nearest level, halfway to the one of larger magnitude. The scale is, by default, the largest magnitude in each
    `block`. With an `offset` it is 10^offset for all values, as in the paper, and `block` plays no part: magnitudes
    above it are sent as the largest level, 0.97 · 10^offset.

    Cost: 8 + 32/block bits per element; with an offset, 8.

    Args:
        block: how many values share a scale; None, the whole tensor.
        offset: the exponent offset, −30 … 30; None, scale by the largest magnitude. The paper's is 1, for N(0, 10²) 2.

    >>> import torch
    >>> Static8(offset=1).decode(Static8(offset=1).encode(torch.tensor([0.0, 0.2345678, -99.0])), 3)
    tensor([ 0.0000,  0.2406, -9.7188])

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §3.1.
    Differs: the smallest level, 1.3 · 10⁻⁸, is 0, so that zeros stay zeros; scaling by blocks is ours.
    """

    block: int | None = DEFAULT_BLOCK
    offset: int | None = None

    summary: ClassVar[str] = "8-bit static tree: 3-bit decimal exponent, 4-bit bisection, scaled per block or by offset"
    examples: ClassVar[tuple[str, ...]] = ("static8", "static8(none)", "static8(64)", "static8(offset=1)")

    def table(self) -> Levels:
        return _static()


@cache
def _static() -> Levels:
    levels = [(0.1 + 0.9 * (part + 0.5) / 16) / 10**n for n in range(7, -1, -1) for part in range(16)]
    return levels_table([0.0, *levels[1:]])


@register("mantissa8")
@dataclass(frozen=True)
class Mantissa8(Offset):
    """Sends sign(x) · m · 10⁻ⁿ · scale/15, m in 0 … 15 and n in 0 … 7.

    x goes to the nearest of these values, halfway to the one of larger magnitude. The scale is, by default, the
    largest magnitude in each `block`, which is thus m = 15, n = 0 and exact. With an `offset` it is 15 · 10^offset for
    all values, so that the levels are m · 10^(offset − n) as in the paper, and `block` plays no part: magnitudes above
    it are sent as 15 · 10^offset.

    Cost: 8 + 32/block bits per element; with an offset, 8.

    Args:
        block: how many values share a scale; None, the whole tensor.
        offset: the exponent offset, −30 … 30; None, scale by the largest magnitude. The paper's is 1, for N(0, 10²) 2.

    >>> import torch
    >>> Mantissa8(offset=0).decode(Mantissa8(offset=0).encode(torch.tensor([0.0, 0.2345678, -99.0])), 3)
    tensor([  0.0000,   0.2000, -15.0000])

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §3.1.
    Differs: of the 128 pairs (n, m) 114 are different numbers (1 is 10 · 10⁻¹); the seven bits are the number's rank
    among them, not the two fields. Scaling by blocks is ours.
    """

    block: int | None = DEFAULT_BLOCK
    offset: int | None = None

    unit: ClassVar[int] = 15
    summary: ClassVar[str] = "8-bit mantissa: 3-bit decimal exponent, 4-bit mantissa, scaled per block or by offset"
    examples: ClassVar[tuple[str, ...]] = ("mantissa8", "mantissa8(none)", "mantissa8(64)", "mantissa8(offset=1)")

    def table(self) -> Levels:
        return _mantissa()


@cache
def _mantissa() -> Levels:
    # In units of 10⁻⁷ the numbers are whole, so that equal ones are seen to be equal.
    numbers = sorted({m * 10**e for e in range(8) for m in range(16)})
    return levels_table([number / (15 * 10**7) for number in numbers])
