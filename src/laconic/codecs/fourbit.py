"""Four bits a value, a sign and one of eight magnitudes, rounded to the nearest: what `int4` and `fp4` share.

Body: a float32 scale for every `block` values, the largest magnitude among them; then the codes, 8·sign + k, packed as
in `planes.py`. A code decodes to ±level[k]·scale, level[7] = 1: the largest magnitude comes back exactly.

Invariant: k is the number of bounds that |x|/scale reaches, so that the loop has neither branches nor a search. A bound
is the least float32 that is nearer to the upper of its two levels, or as near and the upper one's k is even.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import numpy as np

from laconic.codecs import planes, threads
from laconic.codecs.eightbit import power_for
from laconic.codecs.frame import HEADER_NBYTES
from laconic.codecs.kernel import MOST, KernelCodec
from laconic.errors import BadInput
from laconic.kernels import Array, njit

PLACES = 8
DEFAULT_BLOCK = 512  # one group of words of `planes.py`: 4.0625 bits a value


class FourBit(KernelCodec):
    """Base of the codecs with sixteen codes; a subclass has the field `block` and says which magnitudes there are."""

    block: int

    @abstractmethod
    def magnitudes(self) -> Sequence[float]:
        """Eight, increasing, from 0 to 1."""

    def __post_init__(self) -> None:
        if type(self.block) is not int or not PLACES <= self.block <= MOST or self.block % PLACES:
            raise BadInput(f"{self.name}: block is a positive multiple of {PLACES}, at most 2⁶², got {self.block!r}")

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + 4 * (-(-numel // self.block) + -(-numel // PLACES))

    def _parts(self, body: Array, numel: int) -> tuple[Array, Array]:
        """The scales and the words of a body."""
        count = -(-numel // self.block)
        return body[: 4 * count].view(np.float32), body[4 * count :].view(np.uint32)

    @functools.cached_property
    def _tables(self) -> tuple[Array, Array]:
        """The bounds between neighbours, and the magnitudes."""
        levels = np.array(self.magnitudes(), np.float64).astype(np.float32)
        return _bounds(levels), levels

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        scales, words = self._parts(body, v.size)
        (bounds, values), feedback, block = self._tables, x is not v, self.block
        bad = threads.run(
            lambda start, stop: _encode(x, v, feedback, block, bounds, values, start, stop, scales, words),
            v.size,
            align=block,
        )
        if any(bad):
            self.refuse(v)

    def check_body(self, body: Array, numel: int) -> None:
        self.are_large(self._parts(body, numel)[0])  # no code is worth more than its scale: any finite one will do

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        scales, words = self._parts(body, out.size)
        (_, values), block = self._tables, self.block
        threads.run(
            lambda start, stop: _decode(scales, words, values, block, add, start, stop, out), out.size, align=block
        )


def _bounds(levels: Array) -> Array:
    """The seven bounds between eight levels; see the module."""
    wide = levels.astype(np.float64)
    middles = (wide[:-1] + wide[1:]) / 2
    bounds = middles.astype(np.float32)
    for k, (middle, bound) in enumerate(zip(middles, bounds, strict=True)):
        below = float(bound) < middle or (float(bound) == middle and k % 2 == 0)  # the even one keeps the middle
        bounds[k] = np.nextafter(bound, np.float32(2)) if below else bound
    return bounds


@njit(nogil=True, cache=True)
def _code(value: Any, bits: Any, power: Any, inverse: Any, t: Any) -> Any:
    """The code of a value with these bits: its sign, and how many bounds it reaches."""
    y = abs(np.float32(np.float32(value * power) * inverse))
    k = np.uint32(y >= t[0]) + np.uint32(y >= t[1]) + np.uint32(y >= t[2]) + np.uint32(y >= t[3])
    k = np.uint32(k + np.uint32(y >= t[4]) + np.uint32(y >= t[5]) + np.uint32(y >= t[6]))
    return np.uint32(k | ((bits >> np.uint32(28)) & np.uint32(8)))


@njit(nogil=True, cache=True)
def _pack(v: Array, first: int, width: int, power: Any, inverse: Any, t: Any, words: Array, w: int) -> None:
    """Write `width` whole words from w on: the codes of eight runs of as many values from `first` on."""
    signs, run = v.view(np.uint32), np.uint64(width)
    for j in range(run):
        i = np.uint64(first) + j
        word = np.uint32(0)
        for place in range(PLACES):
            at = i + np.uint64(place) * run
            code = _code(v[at], signs[at], power, inverse, t)
            word |= np.uint32(code << np.uint32(4 * place))
        words[np.uint64(w) + j] = word


@njit(nogil=True, cache=True)
def _pack_rest(
    v: Array, first: int, count: int, width: int, power: Any, inverse: Any, t: Any, words: Array, w: int
) -> None:
    """The same for `count` values that fill their last run, or runs, in part."""
    signs = v.view(np.uint32)
    for j in range(width):
        words[np.uint64(w) + np.uint64(j)] = 0
    for at in range(count):
        i, shift = np.uint64(first) + np.uint64(at), np.uint32(4 * (at // width))
        code = _code(v[i], signs[i], power, inverse, t)
        words[np.uint64(w) + np.uint64(at % width)] |= np.uint32(code << (shift & np.uint32(31)))


@njit(nogil=True, cache=True)
def _value(code: Any, s: Any) -> Any:
    """±s[k] for a code, by selections, which a vector register does for all its lanes at once."""
    one, two = (code & np.uint32(1)) != 0, (code & np.uint32(2)) != 0
    low = (s[3] if one else s[2]) if two else (s[1] if one else s[0])
    high = (s[7] if one else s[6]) if two else (s[5] if one else s[4])
    size = high if (code & np.uint32(4)) != 0 else low
    return -size if (code & np.uint32(8)) != 0 else size


@njit(nogil=True, cache=True)
def _unpack_runs(words: Array, w: Any, s: Any, add: bool, start: int, width: int, out: Array) -> None:
    """The eight runs of `width` values of as many whole words from w on."""
    run = np.uint64(width)
    for j in range(run):
        word = words[np.uint64(w) + j]
        for place in range(PLACES):
            i = np.uint64(start) + np.uint64(place) * run + j
            value = _value(np.uint32(word >> np.uint32(4 * place)), s)
            out[i] = out[i] + value if add else value


@njit(nogil=True, cache=True)
def _unpack(words: Array, scale: Any, levels: Array, add: bool, lo: int, hi: int, out: Array) -> None:
    """out[lo:hi] = (out +) ±level[k]·scale."""
    s = (
        np.float32(levels[0] * scale), np.float32(levels[1] * scale), np.float32(levels[2] * scale),
        np.float32(levels[3] * scale), np.float32(levels[4] * scale), np.float32(levels[5] * scale),
        np.float32(levels[6] * scale), np.float32(levels[7] * scale),
    )  # fmt: skip
    group = planes.GROUP_WORDS * PLACES
    for start in range(lo, hi, group):
        count = min(group, hi - start)
        width = (count + PLACES - 1) // PLACES
        w = np.uint64(start // PLACES)
        if count == width * PLACES:
            _unpack_runs(words, w, s, add, start, width, out)
        else:
            for at in range(count):
                i, shift = np.uint64(start) + np.uint64(at), np.uint32(4 * (at // width))
                value = _value(np.uint32(words[w + np.uint64(at % width)] >> (shift & np.uint32(31))), s)
                out[i] = out[i] + value if add else value


@njit(nogil=True, cache=True)
def _encode(
    x: Array, v: Array, feedback: bool, block: int, bounds: Array, levels: Array, start: int, stop: int,
    scales: Array, words: Array,
) -> int:  # fmt: skip
    """Blocks of start … stop, each while it is in cache; returns how many are not finite."""
    group, bad = planes.GROUP_WORDS * PLACES, 0
    t = (bounds[0], bounds[1], bounds[2], bounds[3], bounds[4], bounds[5], bounds[6])
    bits = scales.view(np.int32)
    for lo in range(start, stop, block):
        hi = min(lo + block, stop)
        if feedback:
            planes.add(x, v, lo, hi)
        bits[lo // block] = planes.absmax_bits(v, lo, hi)
        scale = scales[lo // block]
        if not np.isfinite(scale):
            bad += 1
            continue
        power = power_for(scale)
        inverse = np.float32(np.float32(1) / np.float32(scale * power)) if scale > 0 else np.float32(0)
        for at in range(lo, hi, group):
            count = min(group, hi - at)
            width = (count + PLACES - 1) // PLACES
            if count == width * PLACES:
                _pack(v, at, width, power, inverse, t, words, at // PLACES)
            else:
                _pack_rest(v, at, count, width, power, inverse, t, words, at // PLACES)
        if feedback:
            _unpack(words, -scale, levels, True, lo, hi, v)
    return bad


@njit(nogil=True, cache=True)
def _decode(
    scales: Array, words: Array, values: Array, block: int, add: bool, start: int, stop: int, out: Array
) -> None:
    for lo in range(start, stop, block):
        _unpack(words, scales[lo // block], values, add, lo, min(lo + block, stop), out)
