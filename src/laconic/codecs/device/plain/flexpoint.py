"""Integer mantissas with one exponent for the tensor; the arithmetic is `codecs/flexpoint.py`'s."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.codecs.device.plain import register
from laconic.codecs.device.plain.shell import Bodies, magnitude_bits, power_of_two
from laconic.codecs.flexpoint import LEAST_EXPONENT, FlexPoint

_INFINITY = 0x7F800000
_NOT_FINITE = 1 << 20  # in place of an exponent
_ROUND = 12582912.0  # 1.5 · 2²³: what is added and taken away again is rounded to the nearest, ties to even


@register("flexpoint")
class FlexPointOperations(Bodies):
    """Mantissas of 8 or 16 bits."""

    codec: FlexPoint

    def scales(self, numel: int) -> int:
        return 1

    def finite(self, scales: Tensor, numel: int) -> Tensor:
        return (scales <= 129 - self.codec.bits).all()

    def fill(self, v: Tensor, step: int, body: Tensor) -> None:
        top = torch.cat([magnitude_bits(v), torch.zeros(1, dtype=torch.int32, device=v.device)]).amax()
        exponent = torch.full_like(top, self.codec.exponent or 0)
        if self.codec.exponent is None:
            exponent = (_exponent_of(top) - (self.codec.bits - 1)).clamp_(min=LEAST_EXPONENT)
        limit = float(2 ** (self.codec.bits - 1) - 1)
        y = ((v * _half(-exponent)) * _rest(-exponent)).clamp_(-limit, limit)
        mantissas = ((y + _ROUND) - _ROUND).to(self._dtype)
        body[:4] = exponent.masked_fill(top >= _INFINITY, _NOT_FINITE).reshape(1).view(torch.uint8)
        body[4:] = mantissas.view(torch.uint8)

    def values(self, body: Tensor, numel: int) -> Tensor:
        exponent = body[:4].clone().view(torch.int32)[0].clamp(LEAST_EXPONENT, 129 - self.codec.bits)
        mantissas = body[4:].clone().view(self._dtype).to(torch.float32)
        return (mantissas * _half(exponent)) * _rest(exponent)

    @property
    def _dtype(self) -> torch.dtype:
        return torch.int8 if self.codec.bits == 8 else torch.int16


def _half(exponent: Tensor) -> Tensor:
    return power_of_two(exponent >> 1)


def _rest(exponent: Tensor) -> Tensor:
    """The other of two float32 whose product is 2^exponent, which alone may be beyond float32."""
    return power_of_two(exponent - (exponent >> 1))


def _exponent_of(bits: Tensor) -> Tensor:
    """As `math.frexp`: e of m · 2^e with m from 0.5 to 1, and 0 of zero."""
    denormal = (bits.to(torch.float32).view(torch.int32) >> 23) - 127 - 148
    return torch.where(bits < 1 << 23, denormal, (bits >> 23) - 126).masked_fill_(bits == 0, 0).to(torch.int32)
