"""Linear 8-bit quantisation: 127 equal steps each way, rounded to nearest or stochastically."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from laconic.codecs.base import register
from laconic.codecs.eightbit import CHUNK, DEFAULT_BLOCK, BlockScaled, accumulate, largest, power_for
from laconic.codecs.frame import Array
from laconic.codecs.random import bits32, key
from laconic.errors import BadInput
from laconic.kernels import njit

_STEP = np.float32(1 / 127)  # 127 · _STEP is exactly 1 in float32: the largest magnitude comes back exactly


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

    Raises:
        NonFiniteError: on encoding NaN or infinity.

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
                _add(codes[a:b], -scale, residual[a:b])


@njit(nogil=True, cache=True)
def _decode(codes: Array, scales: Array, block: int, add: bool, out: Array) -> None:
    for k in range(scales.size):
        start, stop = k * block, min((k + 1) * block, codes.size)
        if add:
            _add(codes[start:stop], scales[k], out[start:stop])
        else:
            for i in range(start, stop):
                out[np.uint64(i)] = np.float32(np.float32(codes[np.uint64(i)]) * _STEP) * scales[k]


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
def _add(codes: Array, scale: np.float32, out: Array) -> None:
    for i in range(out.size):
        out[i] += np.float32(np.float32(codes[i]) * _STEP) * scale
