"""Flexpoint: integers that share one exponent."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from laconic.codecs import planes, threads
from laconic.codecs.base import register
from laconic.codecs.frame import HEADER_NBYTES
from laconic.codecs.kernel import KernelCodec
from laconic.errors import BadInput, PayloadError
from laconic.kernels import Array, njit

BLOCK = 2048  # values handled while they are in the first-level cache
LEAST_EXPONENT = -149  # the unit of float32's denormals: nothing is finer
_ROUND = 1.5 * 2.0**23  # added and taken away, it rounds a float32 below 2²² to the nearest integer, ties to even


@register("flexpoint")
@dataclass(frozen=True)
class FlexPoint(KernelCodec):
    """Send integer mantissas that share one exponent.

    x'ᵢ = mᵢ·2ᵉ with mᵢ = round(xᵢ/2ᵉ), ties to even, kept within ±(2^(bits−1) − 1). Without `exponent`, e is the least
    for which max |x| < 2^(bits−1)·2ᵉ, no less than −149: an error is at most half a unit 2ᵉ, a whole one for values
    that round to 2^(bits−1) units. With `exponent` larger values saturate, and a read of the tensor is saved.
    The exponent travels in the payload, so any codec of the same bits decodes it. Biased.

    Cost: `bits` bits per value and 32 bits. Two reads of memory, one with `exponent`.

    Args:
        bits: 8 or 16.
        exponent: e, from −149 to 129 − bits, or none to find it.

    >>> import torch
    >>> codec = FlexPoint(8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 0.5, -0.004])), 3)
    tensor([1.0000, 0.5000, 0.0000])

    Source: Köster et al., Flexpoint, NeurIPS 2017, §3.
    Differs: the exponent is a 32-bit integer, not 5 bits with a bias, and found or given, where Autoflex predicts it.
    """

    bits: int = 16
    exponent: int | None = None

    source: ClassVar[str] = "Köster et al., Flexpoint, NeurIPS 2017"
    summary: ClassVar[str] = "integer mantissas with one exponent for the tensor"
    examples: ClassVar[tuple[str, ...]] = ("flexpoint", "flexpoint(8)", "flexpoint(16, exponent=-12)")

    def __post_init__(self) -> None:
        if type(self.bits) is not int or self.bits not in (8, 16):
            raise BadInput(f"flexpoint: bits must be 8 or 16, got {self.bits!r}")
        exponent, most = self.exponent, 129 - self.bits
        if exponent is not None and (type(exponent) is not int or not LEAST_EXPONENT <= exponent <= most):
            raise BadInput(f"flexpoint: exponent must be none or from {LEAST_EXPONENT} to {most}, got {exponent!r}")

    def max_nbytes(self, numel: int) -> int:
        return HEADER_NBYTES + 4 + numel * (self.bits // 8)

    def encode_body(self, x: Array, v: Array, step: int, body: Array) -> None:
        mantissas = body[4:].view(f"i{self.bits // 8}")
        feedback, exponent = x is not v, self.exponent
        given = exponent is not None
        if exponent is None:
            peaks = threads.run(lambda start, stop: _peak(x, v, feedback, start, stop), v.size)
            if not np.isfinite(peaks).all():
                self.refuse(v)
            exponent = max(math.frexp(max(peaks))[1] - (self.bits - 1), LEAST_EXPONENT)
        body[:4].view(np.int32)[0] = exponent
        limit = np.float32(2 ** (self.bits - 1) - 1)
        down, up = _halves(-exponent), _halves(exponent)
        finite = threads.run(
            lambda start, stop: _encode(x, v, feedback, given, down, up, limit, start, stop, mantissas), v.size
        )
        if not all(finite):
            self.refuse(v)

    def decode_body(self, body: Array, out: Array, add: bool) -> None:
        exponent = int(body[:4].view(np.int32)[0])
        if not LEAST_EXPONENT <= exponent <= 129 - self.bits:
            raise PayloadError(f"{self}: a payload's exponent is {exponent}, not {LEAST_EXPONENT} to {129 - self.bits}")
        mantissas, up = body[4:].view(f"i{self.bits // 8}"), _halves(exponent)
        if exponent == 129 - self.bits:  # only then the least mantissa, which no encoder writes, is beyond float32
            self.check_decoded(lambda values: _decode(mantissas, up, values, False, 0, out.size), out.size)
        threads.run(lambda start, stop: _decode(mantissas, up, out, add, start, stop), out.size)


def _halves(exponent: int) -> tuple[np.float32, np.float32]:
    """Two float32 whose product is 2^exponent, which alone may be beyond float32."""
    return np.float32(2.0 ** (exponent // 2)), np.float32(2.0 ** (exponent - exponent // 2))


@njit(nogil=True, cache=True)
def _peak(x: Array, v: Array, feedback: bool, start: int, stop: int) -> Any:
    """max |v|, after v += x where there is feedback; not finite if a value is not."""
    most = np.float32(0)
    for lo in range(start, stop, BLOCK):
        hi = min(lo + BLOCK, stop)
        if feedback:
            planes.add(x, v, lo, hi)
        peak = planes.absmax(v, lo, hi)
        most = most if peak <= most else peak
        if not np.isfinite(most):
            return most
    return most


@njit(nogil=True, cache=True)
def _encode(
    x: Array, v: Array, feedback: bool, fresh: bool, down: Any, up: Any, limit: Any, start: int, stop: int, out: Array
) -> bool:
    """Blocks of start … stop, unread until now if `fresh`; returns whether all values are finite."""
    for lo in range(start, stop, BLOCK):
        hi = min(lo + BLOCK, stop)
        if fresh:
            if feedback:
                planes.add(x, v, lo, hi)
            if not np.isfinite(planes.absmax(v, lo, hi)):
                return False
        for i in range(np.uint64(lo), np.uint64(hi)):
            y = np.float32(np.float32(v[i] * down[0]) * down[1])
            y = y if y < limit else limit
            y = y if y > -limit else -limit
            out[i] = np.int32(np.float32(np.float32(y + np.float32(_ROUND)) - np.float32(_ROUND)))
        if feedback:
            for i in range(np.uint64(lo), np.uint64(hi)):
                v[i] = v[i] - np.float32(np.float32(np.float32(np.int32(out[i])) * up[0]) * up[1])
    return True


@njit(nogil=True, cache=True)
def _decode(mantissas: Array, up: Any, out: Array, add: bool, start: int, stop: int) -> None:
    for i in range(np.uint64(start), np.uint64(stop)):
        value = np.float32(np.float32(np.float32(np.int32(mantissas[i])) * up[0]) * up[1])
        out[i] = out[i] + value if add else value
