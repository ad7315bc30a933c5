"""Half precision: IEEE 754 binary16."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from laconic.codecs.base import register
from laconic.codecs.cast import Cast
from laconic.codecs.frame import Array
from laconic.kernels import njit


@register("fp16")
@dataclass(frozen=True)
class Fp16(Cast):
    """Sends x rounded to the nearest half float, ties to even: 11 significant bits for 6·10⁻⁵ ≤ |x| ≤ 65504.

    Smaller values lose bits down to 6·10⁻⁸, larger finite ones become infinity, and NaN and infinity stay: as in
    every half-precision all-reduce, so that a loss scaler sees the overflow. Cost: 16 bits per element.

    >>> Fp16().decode(Fp16().encode(torch.tensor([0.1, 70000.0])), 2)
    tensor([0.1000,    inf])

    Source: IEEE 754-2008, binary16.
    """

    dtype: ClassVar[torch.dtype] = torch.float16
    source: ClassVar[str] = "IEEE 754-2008, binary16"
    summary: ClassVar[str] = "half floats: 11 significant bits, overflow to infinity above 65504"

    def _set(self, sent: Array, out: Array) -> None:
        _set(sent, out)

    def _add(self, sent: Array, out: Array) -> None:
        _add(sent, out)

    def _carry(self, x: Array, kept: Array, sent: Array) -> None:
        _carry(x, kept, sent)


@njit(nogil=True, cache=True)
def _wide(half: np.uint16) -> np.float32:
    magnitude = np.uint32((np.uint32(half) & np.uint32(0x7FFF)) << np.uint32(13))
    # The exponent's bias goes from 15 to 127 by a multiplication, which is exact also for subnormal halves.
    scaled = np.float32(np.uint32(magnitude).view(np.float32) * np.float32(2.0**112))
    sign = np.uint32((np.uint32(half) & np.uint32(0x8000)) << np.uint32(16))
    bits = np.uint32(np.float32(scaled).view(np.uint32) | sign)
    if magnitude >= np.uint32(0x0F800000):  # infinity and NaN
        bits = np.uint32(bits | np.uint32(0x7F800000))
    return np.uint32(bits).view(np.float32)


@njit(nogil=True, cache=True)
def _narrow(value: np.float32) -> np.uint16:
    """The nearest half, ties to even; NaN becomes quiet and keeps its upper bits, as in the processor's conversion."""
    bits = np.float32(value).view(np.uint32)
    magnitude = np.uint32(bits & np.uint32(0x7FFFFFFF))
    odd = np.uint32((magnitude >> np.uint32(13)) & np.uint32(1))
    half = np.uint32((magnitude + np.uint32(0xC8000FFF) + odd) >> np.uint32(13))  # bias 127 to 15, and round
    # A subnormal half counts 2⁻²⁴, the last bit of a float32 from 0.5 to 1: the addition rounds.
    shifted = np.float32(np.uint32(magnitude).view(np.float32) + np.float32(0.5))
    small = np.uint32(np.float32(shifted).view(np.uint32) - np.uint32(0x3F000000))
    half = small if magnitude < np.uint32(0x38800000) else half
    half = np.uint32(0x7C00) if magnitude >= np.uint32(0x47800000) else half
    quiet = np.uint32(np.uint32(0x7E00) | np.uint32((magnitude >> np.uint32(13)) & np.uint32(0x1FF)))
    half = quiet if magnitude > np.uint32(0x7F800000) else half
    return np.uint16(half | np.uint32((bits >> np.uint32(16)) & np.uint32(0x8000)))


@njit(nogil=True, cache=True)
def _set(halves: Array, out: Array) -> None:
    for i in range(out.size):
        out[i] = _wide(halves[i])


@njit(nogil=True, cache=True)
def _add(halves: Array, out: Array) -> None:
    """out += halves: torch adds mixed types eight times slower than it copies."""
    for i in range(out.size):
        out[i] += _wide(halves[i])


@njit(nogil=True, cache=True)
def _carry(x: Array, kept: Array, halves: Array) -> None:
    for i in range(halves.size):
        value = np.float32(kept[i] + x[i])
        half = _narrow(value)
        halves[i] = half
        kept[i] = value - _wide(half)
