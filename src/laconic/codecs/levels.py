"""Unbiased rounding to equally spaced levels: what the codecs of `rounding.py` share.

A bucket of scale s (its norm) is mapped to top + 1 levels from −s to s. With u uniform in [0, 1), drawn per element,

    code = ⌊top/2 · (x/s + 1) + u⌋,        x' = (code − top/2) · (2s/top)        so that E[x'] = x for |x| ≤ s.

Computed in 31-bit fixed point, f = 31 − bits fractional bits: code = (trunc(x·c) + top·2^(f−1) + (draw ≫ (32 − f))) ≫ f
with c = top·2^(f−1)/s in float32 and the product kept within ±top·2^(f−1). The bias of a code is thus below 2^−f levels
(the truncation) plus the float32 rounding of x·c, 2^−23 of its own size. Decoding is ((code − top/2)·(2/top))·s in
float32, the scale last: two roundings of 2^−24 of the value each, by half of 2^−149 at most where it is denormal. The
extreme levels are ±s exactly, for any s; values within ±s but below float32's normal range thus come back unbiased only
to half of 2^−149.

Body: the buckets' scales (float32), then the codes packed as in `planes.py`.
"""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import numpy as np

from laconic.codecs import planes, random, threads
from laconic.codecs.kernel import Bucketed
from laconic.errors import BadInput
from laconic.kernels import Array, njit

TRITS = planes.TRITS
_THREES = 3 ** np.arange(6, dtype=np.int64)  # to raise to a power in a kernel takes 0.3 s to compile
MAX, L2, CLIPPED = 0, 1, 2  # a bucket's scale: max |x|, ‖x‖₂, or min(max |x|, clip·σ), σ² = Σx²/n
FLOAT32_MAX = float(np.finfo(np.float32).max)


class LevelsCodec(Bucketed):
    """Base of the codecs that round to levels; subclasses have the fields `bucket` and `seed` and say the rest."""

    seed: int

    stochastic: ClassVar[bool] = True

    @property
    @abstractmethod
    def top(self) -> int:
        """The highest code."""

    @property
    def norm_kind(self) -> int:
        return MAX

    @property
    def _clip(self) -> float:
        return 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.seed) is not int:
            raise BadInput(f"{self.name}: seed must be an integer, got {self.seed!r}")

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        numel = v.size
        key = random.key(self.seed, step)
        scales, words = self.parts(body, numel)
        feedback, whole = x is not v, self.bucket is None
        if whole and numel:
            scales[0] = self._whole_scale(x, v)
        bucket, norm, clip = self._stride, self.norm_kind, self._clip
        bad = threads.run(
            lambda start, stop: _encode(
                x, v, feedback, bucket, whole, norm, clip, self.top, self.places, key, start, stop, scales, words
            ),
            numel,
            align=bucket,
        )
        if any(bad):
            self.refuse(v)

    @property
    def _stride(self) -> int:
        """What a kernel works on at a time: a bucket, or a group where the whole tensor is one bucket."""
        return self.bucket or planes.GROUP_WORDS * self.places

    def _whole_scale(self, x: Array, v: Array) -> Any:
        """The scale of a single bucket, after v += x where there is feedback; chunk sums are added in order."""
        stats = np.zeros((2, -(-v.size // planes.CHUNK)))
        feedback, norm = x is not v, self.norm_kind
        threads.run(
            lambda start, stop: _chunk_stats(x, v, feedback, norm, start, stop, stats), v.size, align=planes.CHUNK
        )
        if not np.isfinite(stats).all():
            self.refuse(v)
        return _scale(stats[0].max(), np.add.accumulate(stats[1])[-1], v.size, norm, self._clip)

    def check_body(self, body: Array, numel: int) -> None:
        scales, words = self.parts(body, numel)
        if self.are_large(scales):
            self.check_decoded(lambda values: self._unpack(scales, words, values, False), numel)

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        scales, words = self.parts(body, out.size)
        self._unpack(scales, words, out, add)

    def _unpack(self, scales: Array, words: Array, out: Array, add: bool) -> None:
        bucket, whole = self._stride, self.bucket is None
        threads.run(
            lambda start, stop: _decode(scales, words, out, add, bucket, whole, self.top, self.places, start, stop),
            out.size,
            align=bucket,
        )


@njit(nogil=True, cache=True)
def _stats(v: Array, lo: int, hi: int, norm: int, lanes: Array) -> tuple[float, float]:
    """(max |v|, Σ v²), 0 for what `norm` does not need; one of them is not finite if and only if a value is not."""
    squares = 0.0 if norm == MAX else planes.sum_squares(v, lo, hi, lanes)
    return 0.0 if norm == L2 else planes.absmax(v, lo, hi), squares


@njit(nogil=True, cache=True)
def _scale(most: float, squares: float, count: int, norm: int, clip: float) -> Any:
    """A bucket's float32 scale. ‖x‖₂ may exceed float32; its largest value still bounds every |x|, which is enough."""
    if norm == L2:
        return np.float32(min(np.sqrt(squares), FLOAT32_MAX))
    if norm == CLIPPED:
        return np.float32(min(most, clip * np.sqrt(squares / count)))
    return np.float32(most)


@njit(nogil=True, cache=True)
def _chunk_stats(x: Array, v: Array, feedback: bool, norm: int, start: int, stop: int, stats: Array) -> None:
    lanes = np.empty(planes.LANES)
    for lo in range(start, stop, planes.CHUNK):
        hi = min(lo + planes.CHUNK, stop)
        if feedback:
            planes.add(x, v, lo, hi)
        chunk = lo // planes.CHUNK
        stats[0, chunk], stats[1, chunk] = _stats(v, lo, hi, norm, lanes)


@njit(nogil=True, cache=True)
def _weight(place: int, places: int) -> Any:
    """What a code is multiplied by at a place of its word."""
    if places == planes.TRITS:
        return np.uint32(_THREES[place % 5] << (8 * (place // 5)))
    return np.uint32(1 << (32 // places * place))


@njit(nogil=True, cache=True)
def _round(
    v: Array, first: int, count: int, shrink: Any, c: Any, top: int, key: Any, weight: int, words: Array, w: int
) -> None:
    """Add the codes of v[first:first + count], times weight, to the words from w on."""
    bits = 0
    while top >> bits:
        bits += 1
    # `& 31` tells LLVM that 32-bit shifts are enough.
    f, drop = np.uint32((31 - bits) & 31), np.uint32((bits + 1) & 31)
    middle = np.int32(top << (30 - bits))
    limit = np.float32(middle)
    here = random.key_at(key, first)
    for j in range(count):
        y = np.float32(np.float32(v[np.uint64(first) + np.uint64(j)] * shrink) * c)
        y = y if y < limit else limit
        y = y if y > -limit else -limit
        draw = random.bits32(here, np.uint32(np.uint32(first) + np.uint32(j))) >> (drop & np.uint32(31))
        level = np.uint32(np.uint32(np.int32(np.int32(y) + middle)) + np.uint32(draw)) >> (f & np.uint32(31))
        words[np.uint64(w) + np.uint64(j)] += np.uint32(np.uint32(level) * np.uint32(weight))


@njit(nogil=True, cache=True)
def _pack(v: Array, lo: int, hi: int, scale: float, top: int, places: int, key: Any, words: Array) -> None:
    """The codes of v[lo:hi] into the words from lo / places on."""
    bits = 0
    while top >> bits:
        bits += 1
    # A scale below 2⁻⁶⁰ is first brought up by a power of two, or c would overflow.
    shrink = np.float32(2.0**96) if scale < 2.0**-60 else np.float32(1)
    c = np.float32(top * 2.0 ** (30 - bits) / (np.float64(scale) * np.float64(shrink))) if scale > 0 else np.float32(0)
    group = planes.GROUP_WORDS * places
    for start in range(lo, hi, group):
        count = min(group, hi - start)
        width = (count + places - 1) // places
        w = start // places
        for j in range(width):
            words[np.uint64(w) + np.uint64(j)] = 0
        for place in range((count + width - 1) // width):
            first = start + place * width
            length = min(width, start + count - first)
            # The 32-bit index of the draws must not wrap within a call.
            part = min(length, (((first >> 32) + 1) << 32) - first)
            _round(v, first, part, shrink, c, top, key, _weight(place, places), words, w)
            if part < length:
                _round(v, first + part, length - part, shrink, c, top, key, _weight(place, places), words, w + part)


@njit(nogil=True, cache=True)
def _unpack(words: Array, scale: float, top: int, places: int, add: bool, out: Array, lo: int, hi: int) -> None:
    """out[lo:hi] = (out +) ((code − top/2)·(2/top))·scale."""
    half, unit = np.float32(top * 0.5), np.float32(2.0 / top)
    group = planes.GROUP_WORDS * places
    for start in range(lo, hi, group):
        count = min(group, hi - start)
        width = (count + places - 1) // places
        w = np.uint64(start // places)
        for place in range((count + width - 1) // width):
            first = start + place * width
            length = min(width, start + count - first)
            if places == planes.TRITS:
                # Byte b holds Σ tₖ·3ᵏ: the digit tₖ is 3 × the fraction of b / 3^(k+1), here in 16-bit fixed point.
                shift, third = np.uint32(8 * (place // 5)), np.uint32(65536 // _THREES[place % 5 + 1] + 1)
                for j in range(length):
                    i = np.uint64(first) + np.uint64(j)
                    byte = np.uint32((words[w + np.uint64(j)] >> (shift & np.uint32(31))) & np.uint32(255))
                    fraction = np.uint32(np.uint32(byte * third) & np.uint32(65535))
                    trit = np.int32(np.uint32(fraction * np.uint32(3)) >> np.uint32(16))
                    value = np.float32((np.float32(trit) - half) * unit) * scale
                    out[i] = out[i] + value if add else value
            else:
                shift, mask = np.uint32(32 // places * place), np.uint32((1 << (32 // places)) - 1)
                for j in range(length):
                    i = np.uint64(first) + np.uint64(j)
                    code = np.int32((words[w + np.uint64(j)] >> (shift & np.uint32(31))) & mask)
                    value = np.float32((np.float32(code) - half) * unit) * scale
                    out[i] = out[i] + value if add else value


@njit(nogil=True, cache=True)
def _encode(
    x: Array,
    v: Array,
    feedback: bool,
    bucket: int,
    whole: bool,
    norm: int,
    clip: float,
    top: int,
    places: int,
    key: Any,
    start: int,
    stop: int,
    scales: Array,
    words: Array,
) -> int:
    """Buckets of start … stop, each while it is in cache; returns how many buckets are not finite."""
    lanes = np.empty(planes.LANES)
    bad = 0
    for lo in range(start, stop, bucket):
        hi = min(lo + bucket, stop)
        b = 0 if whole else lo // bucket
        if not whole:
            if feedback:
                planes.add(x, v, lo, hi)
            most, squares = _stats(v, lo, hi, norm, lanes)
            if not np.isfinite(most + squares):
                bad += 1
                continue
            scales[b] = _scale(most, squares, hi - lo, norm, clip)
        _pack(v, lo, hi, scales[b], top, places, key, words)
        if feedback:
            _unpack(words, -scales[b], top, places, feedback, v, lo, hi)  # a literal would be a kernel of its own
    return bad


@njit(nogil=True, cache=True)
def _decode(
    scales: Array,
    words: Array,
    out: Array,
    add: bool,
    bucket: int,
    whole: bool,
    top: int,
    places: int,
    start: int,
    stop: int,
) -> None:
    """Buckets of start … stop; whatever the words hold, a code lies within 0 … 2^bits − 1."""
    for lo in range(start, stop, bucket):
        scale = scales[0 if whole else lo // bucket]
        _unpack(words, scale, top, places, add, out, lo, min(lo + bucket, stop))
