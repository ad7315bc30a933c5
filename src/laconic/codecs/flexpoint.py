"""Flexpoint: integers that share one exponent, and the prediction of that exponent."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
from torch import Tensor

from laconic.codecs import frame, planes, threads
from laconic.codecs.base import Codec, register
from laconic.codecs.planes import Array
from laconic.errors import BadInput, NonFiniteError, PayloadError
from laconic.kernels import njit

BLOCK = 2048  # values handled while they are in the first-level cache
LEAST_EXPONENT = -149  # the unit of float32's denormals: nothing is finer
_ROUND = 1.5 * 2.0**23  # added and taken away, it rounds a float32 below 2²² to the nearest integer, ties to even


@register("flexpoint")
@dataclass(frozen=True)
class FlexPoint(Codec):
    """Send integer mantissas that share one exponent.

    x'ᵢ = mᵢ·2ᵉ with mᵢ = round(xᵢ/2ᵉ), ties to even, kept within ±(2^(bits−1) − 1). Without `exponent`, e is the least
    for which max |x| < 2^(bits−1)·2ᵉ, no less than −149: an error is at most half a unit 2ᵉ, a whole one for values
    that round to 2^(bits−1) units. With `exponent` larger values saturate; predict it from the past with
    `predict_exponent`, which saves a read of the tensor. The exponent travels in the payload, so any codec of the same
    bits decodes it. Biased.

    Cost: `bits` bits per value and 32 bits. Two reads of memory, one with `exponent`.

    Args:
        bits: 8 or 16.
        exponent: e, from −149 to 129 − bits, or none to find it.

    Raises:
        BadInput: an argument is none of these.
        NonFiniteError: from encode. From encode_feedback too, and then the residual is spoilt: zero it.

    >>> import torch
    >>> codec = FlexPoint(8)
    >>> codec.decode(codec.encode(torch.tensor([1.0, 0.5, -0.004])), 3)
    tensor([1.0000, 0.5000, 0.0000])

    Source: Köster et al., Flexpoint, NeurIPS 2017, §3.
    Differs: the exponent is a 32-bit integer instead of 5 bits with a bias; the state of Autoflex is the caller's.
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
        return frame.HEADER_NBYTES + 4 + numel * (self.bits // 8)

    def encode(self, x: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        array = frame.floats(x, self)
        return self._encode(array, array, out)

    def encode_feedback(self, x: Tensor, residual: Tensor, *, step: int = 0, out: Tensor | None = None) -> Tensor:
        array, carried = frame.floats(x, self), frame.floats(residual, self)
        if array.size != carried.size:
            raise BadInput(f"{self}: residual has {carried.size} values, x has {array.size}")
        return self._encode(array, carried, out)

    def _encode(self, x: Array, v: Array, out: Tensor | None) -> Tensor:
        """Encode v, or with feedback, when v is not x: v += x; encode v; v −= decoded."""
        buffer = frame.buffer_for(self, v.size, out)
        nbytes = self.max_nbytes(v.size)
        body = buffer[frame.HEADER_NBYTES : nbytes].numpy()
        mantissas = body[4:].view(f"i{self.bits // 8}")
        feedback, exponent = x is not v, self.exponent
        given = exponent is not None
        if exponent is None:
            peaks = threads.run(lambda start, stop: _peak(x, v, feedback, start, stop), v.size)
            if not np.isfinite(peaks).all():
                self._refuse(v)
            exponent = max(math.frexp(max(peaks))[1] - (self.bits - 1), LEAST_EXPONENT)
        body[:4].view(np.int32)[0] = exponent
        limit = np.float32(2 ** (self.bits - 1) - 1)
        down, up = _halves(-exponent), _halves(exponent)
        finite = threads.run(
            lambda start, stop: _encode(x, v, feedback, given, down, up, limit, start, stop, mantissas), v.size
        )
        if not all(finite):
            self._refuse(v)
        return frame.seal(buffer, self.name, v.size, nbytes)

    def _refuse(self, v: Array) -> None:
        first = int(np.flatnonzero(~np.isfinite(v))[0])
        raise NonFiniteError(f"{self}: value {first} of {v.size} is {v[first]}; only finite values can be encoded")

    def decode(self, payload: Tensor, numel: int, *, out: Tensor | None = None) -> Tensor:
        values = frame.values_for(self, numel, out)
        self._decode(payload, frame.floats(values, self), False)
        return values

    def decode_add(self, payload: Tensor, out: Tensor) -> None:
        self._decode(payload, frame.floats(out, self), True)

    def _decode(self, payload: Tensor, out: Array, add: bool) -> None:
        exponent, mantissas = self._open(payload, out.size)
        up = _halves(exponent)
        threads.run(lambda start, stop: _decode(mantissas, up, out, add, start, stop), out.size)

    def _open(self, payload: Tensor, numel: int) -> tuple[int, Array]:
        body = frame.unseal(payload, self.name, numel, nbytes=self.max_nbytes(numel))
        exponent = int(body[:4].view(np.int32)[0])
        if not LEAST_EXPONENT <= exponent <= 129 - self.bits:
            raise PayloadError(f"{self}: a payload's exponent is {exponent}, not {LEAST_EXPONENT} to {129 - self.bits}")
        return exponent, body[4:].view(f"i{self.bits // 8}")

    def peak(self, payload: Tensor, numel: int) -> float:
        """The largest magnitude a payload holds: what `predict_exponent` keeps a history of."""
        exponent, mantissas = self._open(payload, numel)
        return math.ldexp(int(np.abs(mantissas.astype(np.int32)).max(initial=0)), exponent)


def predict_exponent(peaks: Sequence[float], exponent: int, bits: int = 16) -> int:
    """Autoflex: the exponent for the next tensor from the peaks of the last ones.

    χ = 2·(max(peaks) + 3·std(peaks) + 100·2^exponent); the result is ⌈log₂ χ⌉ − (bits − 1), so that a growing tensor
    keeps headroom and a single outlier is remembered for as long as the history is. If the newest peak saturated, the
    older ones say nothing of the scale: only it counts, doubled. A pure function: the caller keeps `peaks` (the paper:
    the last 16) and the exponent in use.

    Args:
        peaks: the largest magnitudes of recent tensors, newest last, as `FlexPoint.peak` gives them; at least one.
        exponent: the exponent the newest was encoded with.
        bits: of the mantissas.

    >>> predict_exponent([0.9, 1.0, 1.1], exponent=-14)
    -13
    >>> predict_exponent([1.0, 32767 * 2.0**-14], exponent=-14)  # saturated: make room
    -11

    Source: Köster et al., Flexpoint, NeurIPS 2017, the Autoflex algorithm with α = 2, β = 3, γ = 100.
    """
    if not peaks or not all(0 <= peak < math.inf for peak in peaks):
        raise BadInput("predict_exponent needs one or more finite peaks, none negative")
    unit = math.ldexp(1.0, exponent)
    history = list(peaks)
    if history[-1] >= (2 ** (bits - 1) - 1) * unit:
        history = [2 * history[-1]]
    room = 2 * (max(history) + 3 * statistics.pstdev(history) + 100 * unit)
    return min(max(math.ceil(math.log2(room)) - (bits - 1), LEAST_EXPONENT), 129 - bits)


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
