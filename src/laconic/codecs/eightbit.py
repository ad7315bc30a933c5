"""What the 8-bit codecs share, one scale per block and one byte per value; and `linear8`, whose levels are arithmetic.

Callers: the codecs whose levels are a table, `tables8.py` and `fp8.py`.

Body: the scales, float32, one per block; then the codes, one byte per value. A value decodes to level[code] · scale.
The scale is the block's largest magnitude, so every level lies in [−1, 1]. `block=None` is one block: the whole tensor.

Invariants: a block is read, scaled and quantised while it is in the first-level cache; a NaN or an infinity shows up
as a scale that is not finite, without a pass of its own; nothing overflows, from the smallest denormal to the largest
float. After a NonFiniteError from `encode_feedback` the residual holds residual + x where the bad block is, and what
was to be kept elsewhere.
"""

from __future__ import annotations

import functools
from abc import abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from laconic.codecs import threads
from laconic.codecs.base import register
from laconic.codecs.frame import HEADER_NBYTES
from laconic.codecs.kernel import MOST, KernelCodec
from laconic.codecs.random import bits32, key
from laconic.errors import BadInput
from laconic.kernels import Array, njit

DEFAULT_BLOCK = 4096
CHUNK = 4096  # values at a time: with its scratch 64 KB, of which each loop touches half
_STEP = np.float32(1 / 127)  # 127 · _STEP is exactly 1 in float32: the largest magnitude comes back exactly


class BlockScaled(KernelCodec):
    """One scale per `block` values and one byte per value: 8 + 32/block bits per element."""

    block: int | None

    def __post_init__(self) -> None:
        if self.block is not None and (type(self.block) is not int or not 1 <= self.block <= MOST):
            raise BadInput(f"{self.name}: block must be none or from 1 to 2⁶² values, got {self.block!r}")

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + 4 * self._blocks(numel) + numel

    def fixed_scale(self) -> float | None:
        """The scale of everything, for a codec that does not scale by the largest magnitude."""
        return None

    @abstractmethod
    def _encode(self, x: Array, residual: Array, codes: Array, scales: Array, *options: Any) -> None:
        """Fill `codes`, and `scales` unless given; options: block, given, feedback, first index, step."""

    @abstractmethod
    def _decode(self, codes: Array, scales: Array, block: int, add: bool, out: Array) -> None:
        """out = level[code] · scale, or out += it."""

    def _blocks(self, numel: int) -> int:
        return min(numel, 1) if self._one_scale else -(-numel // (self.block or 1))

    @functools.cached_property
    def _one_scale(self) -> bool:
        return self.block is None or self.fixed_scale() is not None

    @property
    def align(self) -> int:
        """Ranges of values that are coded by themselves begin at multiples of this."""
        return CHUNK if self._one_scale else self.block or 1

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        numel, feedback, given = v.size, x is not v, self._one_scale
        scales = np.empty(self._blocks(numel), np.float32)
        codes = body[4 * scales.size :]
        if given and numel:
            prepare = (lambda a, b: accumulate(x[a:b], v[a:b])) if feedback else (lambda a, b: largest(x[a:b]))
            scales[0] = np.uint32(max(threads.run(prepare, numel))).view(np.float32)
            self.check_scales(scales, v)
            fixed = self.fixed_scale()
            scales[0] = scales[0] if fixed is None else fixed

        def kernel(a: int, b: int) -> None:
            part, block = self.scales_of(scales, a, b)
            self._encode(x[a:b], v[a:b], codes[a:b], part, block, given, feedback, a, step)

        threads.run(kernel, numel, align=self.align)
        self.check_scales(scales, v)
        body[: 4 * scales.size] = scales.view(np.uint8)

    def scales_and_codes(self, body: Array, numel: int) -> tuple[Array, Array]:
        """The two parts of a body; the scales are copied, to be aligned."""
        count = self._blocks(numel)
        return body[: 4 * count].copy().view(np.float32), body[4 * count :]

    def check_body(self, body: Array, numel: int) -> None:
        scales, codes = self.scales_and_codes(body, numel)
        if self.are_large(scales):
            self.check_decoded(lambda values: self._unpack(codes, scales, values, False), numel)

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        scales, codes = self.scales_and_codes(body, out.size)
        self._unpack(codes, scales, out, add)

    def _unpack(self, codes: Array, scales: Array, out: Array, add: bool) -> None:
        def kernel(a: int, b: int) -> None:
            part, block = self.scales_of(scales, a, b)
            self._decode(codes[a:b], part, block, add, out[a:b])

        threads.run(kernel, out.size, align=self.align)

    def scales_of(self, scales: Array, start: int, stop: int) -> tuple[Array, int]:
        """The scales of one aligned range, and how many of its values share one."""
        if self._one_scale or self.block is None:
            return scales, max(1, stop - start)
        return scales[start // self.block : -(-stop // self.block)], self.block


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


@register("linear8")
@dataclass(frozen=True)
class Linear8(BlockScaled):
    """Sends q = round(127 · x/scale), an int8 in −127 … 127; decodes q/127 · scale.

    The scale is the largest magnitude in each `block`. Rounding is to nearest, ties to even; or, `stochastic`, up with
    the probability of the fraction, which makes the codec unbiased: E[decode] = x.

    Cost: 8 + 32/block bits per element. |decode − x| ≤ scale/254 (nearest) or scale/127 (stochastic).

    Args:
        block: how many values share a scale; None, the whole tensor (as in the paper).
        stochastic: round at random, by (seed, step, index).
        seed: of the random bits.

    >>> import torch
    >>> Linear8().decode(Linear8().encode(torch.tensor([0.0, 0.5, -1.0])), 3)
    tensor([ 0.0000,  0.5039, -1.0000])

    Source: Vanhoucke et al., Improving the speed of neural networks on CPUs, 2011; Dettmers, 8-Bit Approximations for
    Parallelism in Deep Learning, ICLR 2016, §3.1.
    Differs: blocks, where the papers scale the whole tensor; the sign is that of an int8, not a bit of its own.
    """

    block: int | None = DEFAULT_BLOCK
    stochastic: bool = False  # type: ignore[misc]  # depends on the instance here
    seed: int = 0

    source: ClassVar[str] = "Vanhoucke et al. 2011; Dettmers, 8-Bit Approximations for Parallelism, ICLR 2016"
    summary: ClassVar[str] = "8-bit linear quantisation scaled per block, to nearest or stochastic (then unbiased)"
    examples: ClassVar[tuple[str, ...]] = (
        "linear8", "linear8(none)", "linear8(64)", "linear8(stochastic=true)", "linear8(none, stochastic=true, seed=3)",
    )  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.stochastic) is not bool:
            raise BadInput(f"linear8: stochastic is true or false, got {self.stochastic!r}")
        if type(self.seed) is not int:
            raise BadInput(f"linear8: seed is a whole number, got {self.seed!r}")

    @property
    def unbiased(self) -> bool:  # type: ignore[override]
        return self.stochastic

    def _encode(self, x: Array, residual: Array, codes: Array, scales: Array, *options: Any) -> None:
        block, given, feedback, first, step = options
        bits = key(self.seed, step) if self.stochastic else np.uint64(0)
        _encode(x, residual, codes.view(np.int8), scales, block, given, feedback, self.stochastic, bits, first)

    def _decode(self, codes: Array, scales: Array, block: int, add: bool, out: Array) -> None:
        _decode(codes.view(np.int8), scales, block, add, out)


@njit(nogil=True, cache=True)
def _encode(
    x: Array, residual: Array, codes: Array, scales: Array, block: int, given: bool, feedback: bool,
    stochastic: bool, key: np.uint64, first: int,
) -> None:  # fmt: skip
    for k in range(scales.size):
        start, stop = k * block, min((k + 1) * block, x.size)
        if not given:
            top = accumulate(x[start:stop], residual[start:stop]) if feedback else largest(x[start:stop])
            scales[k] = np.uint32(top).view(np.float32)
        scale = scales[k]
        if not scale < np.inf:
            continue
        power = power_for(scale)
        inverse = np.float32(np.float32(127) / np.float32(scale * power)) if scale > 0 else np.float32(0)
        for a in range(start, stop, CHUNK):
            b = min(a + CHUNK, stop)
            if stochastic:
                _round_at_random(residual[a:b], power, inverse, key, first + a, codes[a:b])
            else:
                _round_to_nearest(residual[a:b], power, inverse, codes[a:b])
            if feedback:
                _put(codes[a:b], -scale, True, residual[a:b])


@njit(nogil=True, cache=True)
def _decode(codes: Array, scales: Array, block: int, add: bool, out: Array) -> None:
    for k in range(scales.size):
        start, stop = k * block, min((k + 1) * block, codes.size)
        _put(codes[start:stop], scales[k], add, out[start:stop])


@njit(nogil=True, cache=True)
def _round_to_nearest(values: Array, power: np.float32, inverse: np.float32, codes: Array) -> None:
    """q = round(v): the low byte of v + 1.5 · 2²³, whose last mantissa bit counts ones."""
    for i in range(codes.size):
        shifted = np.float32(np.float32(np.float32(values[i] * power) * inverse) + np.float32(12582912.0))
        codes[i] = np.int8(np.float32(shifted).view(np.int32))


@njit(nogil=True, cache=True)
def _round_at_random(
    values: Array, power: np.float32, inverse: np.float32, key: np.uint64, first: int, codes: Array
) -> None:
    """q = ⌊v⌋ + (r < v − ⌊v⌋) with r uniform in [0, 1), a multiple of 2⁻²⁴."""
    for i in range(codes.size):
        v = np.float32(np.float32(values[i] * power) * inverse)
        floor = np.float32(np.floor(v))
        r = np.float32(np.float32(np.int32(bits32(key, first + i) >> np.uint32(8))) * np.float32(2.0**-24))
        q = np.float32(floor + np.float32(1)) if r < np.float32(v - floor) else floor
        codes[i] = np.int8(np.int32(min(q, np.float32(127))))


@njit(nogil=True, cache=True)
def _put(codes: Array, scale: np.float32, add: bool, out: Array) -> None:
    for i in range(out.size):
        value = np.float32(np.float32(np.float32(codes[i]) * _STEP) * scale)
        out[i] = out[i] + value if add else value
