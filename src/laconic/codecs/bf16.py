"""Brain floats: float32's exponent, 8 significant bits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from laconic.codecs.base import register
from laconic.codecs.cast import Cast
from laconic.codecs.frame import Array
from laconic.kernels import njit


@register("bf16")
@dataclass(frozen=True)
class Bf16(Cast):
    """Sends x rounded to the nearest bfloat16, ties to even: 8 significant bits over float32's whole range.

    NaN and infinity stay; a finite value above 3.39·10³⁸ becomes infinity. Cost: 16 bits per element.

    >>> Bf16().decode(Bf16().encode(torch.tensor([1.0, 1e38])), 2)
    tensor([1.0000e+00, 9.9692e+37])

    Source: Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019.
    """

    dtype: ClassVar[torch.dtype] = torch.bfloat16
    source: ClassVar[str] = "Kalamkar et al., A Study of BFLOAT16 for Deep Learning Training, 2019"
    summary: ClassVar[str] = "brain floats: 8 significant bits, float32's range"

    def _set(self, sent: Array, out: Array) -> None:
        _set(sent, out)

    def _add(self, sent: Array, out: Array) -> None:
        _add(sent, out)

    def _carry(self, x: Array, kept: Array, sent: Array) -> None:
        _carry(x, kept, sent)


@njit(nogil=True, cache=True)
def _wide(half: np.uint16) -> np.float32:
    return np.uint32(np.uint32(half) << np.uint32(16)).view(np.float32)


@njit(nogil=True, cache=True)
def _narrow(value: np.float32) -> np.uint16:
    """The nearest bfloat16, ties to even; any NaN becomes the one that torch writes."""
    bits = np.float32(value).view(np.uint32)
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    half = np.uint32((bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))
    return np.uint16(np.uint32(0xFFFF) if value != value else half)


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
