"""The identity codec: float32 as it is, and the worked example of the interface."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from laconic.codecs.base import register
from laconic.codecs.cast import Cast
from laconic.codecs.frame import Array


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
    source: ClassVar[str] = "IEEE 754-2008, binary32"
    summary: ClassVar[str] = "float32 unchanged"

    def _add(self, values: Tensor, factor: float, out: Array) -> None:
        torch.from_numpy(out).add_(values, alpha=factor)
