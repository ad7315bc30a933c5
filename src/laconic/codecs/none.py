"""The identity codec: float32 as it is, and the worked example of the interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import torch

from laconic.codecs.base import register
from laconic.codecs.cast import Cast
from laconic.codecs.frame import Array
from laconic.kernels import njit


@register("none")
@dataclass(frozen=True)
class NoneCodec(Cast):
    """Sends x unchanged, bit for bit, NaN and infinities included.

    Cost: 32 bits per element; encode is one copy.

    >>> payload = NoneCodec().encode(torch.tensor([0.1, -0.0]))
    >>> payload.numel(), NoneCodec().decode(payload, 2)
    (24, tensor([0.1000, -0.0000]))
    """

    dtype: ClassVar[torch.dtype] = torch.float32
    unbiased: ClassVar[bool] = True
    exact: ClassVar[bool] = True
    source: ClassVar[str] = "IEEE 754-2008, binary32"
    summary: ClassVar[str] = "float32 unchanged"

    def _set(self, sent: Array, out: Array) -> None:
        out[:] = sent

    def _add(self, sent: Array, out: Array) -> None:
        with np.errstate(invalid="ignore", over="ignore"):  # ∞ − ∞ is NaN, as in torch, which does not warn either
            out += sent

    def _carry(self, x: Array, kept: Array, sent: Array) -> None:
        _carry(x, kept, sent)


@njit(nogil=True, cache=True)
def _carry(x: Array, kept: Array, sent: Array) -> None:
    for i in range(sent.size):
        value = np.float32(kept[i] + x[i])
        sent[i] = value
        kept[i] = value - value  # 0, or NaN
