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
        """The bounds between neighbours, and the values of all sixteen codes."""
        levels = np.array(self.magnitudes(), np.float64).astype(np.float32)
        return _bounds(levels), np.concatenate([levels, -levels])

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
def _pack(
    v: Array, first: int, count: int, power: Any, inverse: Any, t: Array, shift: int, words: Array, w: int
) -> None:
    """Add the codes of v[first:first + count], shifted, to the words from w on."""
    t0, t1, t2, t3, t4, t5, t6 = t[0], t[1], t[2], t[3], t[4], t[5], t[6]
    signs, left = v.view(np.uint32), np.uint32(shift)
    for j in range(count):
        i = np.uint64(first) + np.uint64(j)
        y = abs(np.float32(np.float32(v[i] * power) * inverse))
        k = np.uint32(y >= t0) + np.uint32(y >= t1) + np.uint32(y >= t2) + np.uint32(y >= t3)
        k = np.uint32(k + np.uint32(y >= t4) + np.uint32(y >= t5) + np.uint32(y >= t6))
        code = np.uint32(k | ((signs[i] >> np.uint32(28)) & np.uint32(8)))
        words[np.uint64(w) + np.uint64(j)] |= np.uint32(code << (left & np.uint32(31)))


@njit(nogil=True, cache=True)
def _unpack(words: Array, scale: Any, values: Array, add: bool, lo: int, hi: int, out: Array) -> None:
    """out[lo:hi] = (out +) values[code]·scale."""
    group = planes.GROUP_WORDS * PLACES
    scaled = np.empty(16, np.float32)
    for code in range(16):
        scaled[code] = np.float32(values[code] * scale)
    for start in range(lo, hi, group):
        count = min(group, hi - start)
        width = (count + PLACES - 1) // PLACES
        w = np.uint64(start // PLACES)
        for place in range((count + width - 1) // width):
            first = start + place * width
            shift = np.uint32(4 * place)
            for j in range(min(width, start + count - first)):
                i = np.uint64(first) + np.uint64(j)
                code = (words[w + np.uint64(j)] >> (shift & np.uint32(31))) & np.uint32(15)
                value = scaled[np.uint64(code)]
                out[i] = out[i] + value if add else value


@njit(nogil=True, cache=True)
def _encode(
    x: Array, v: Array, feedback: bool, block: int, bounds: Array, values: Array, start: int, stop: int,
    scales: Array, words: Array,
) -> int:  # fmt: skip
    """Blocks of start … stop, each while it is in cache; returns how many are not finite."""
    group, bad = planes.GROUP_WORDS * PLACES, 0
    for lo in range(start, stop, block):
        hi = min(lo + block, stop)
        if feedback:
            planes.add(x, v, lo, hi)
        scale = planes.absmax(v, lo, hi)
        if not np.isfinite(scale):
            bad += 1
            continue
        scales[lo // block] = scale
        power = power_for(scale)
        inverse = np.float32(np.float32(1) / np.float32(scale * power)) if scale > 0 else np.float32(0)
        for at in range(lo, hi, group):
            count = min(group, hi - at)
            width = (count + PLACES - 1) // PLACES
            w = at // PLACES
            for j in range(width):
                words[np.uint64(w) + np.uint64(j)] = 0
            for place in range((count + width - 1) // width):
                first = at + place * width
                _pack(v, first, min(width, at + count - first), power, inverse, bounds, 4 * place, words, w)
        if feedback:
            _unpack(words, -scale, values, True, lo, hi, v)
    return bad


@njit(nogil=True, cache=True)
def _decode(
    scales: Array, words: Array, values: Array, block: int, add: bool, start: int, stop: int, out: Array
) -> None:
    for lo in range(start, stop, block):
        _unpack(words, scales[lo // block], values, add, lo, min(lo + block, stop), out)
