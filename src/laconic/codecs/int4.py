"""4-bit integers with a scale a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.fourbit import DEFAULT_BLOCK, FourBit


@register("int4")
@dataclass(frozen=True)
class Int4(FourBit):
    """Sends q = round(7·x/scale), −7 … 7, ties to even; decodes q/7·scale. The scale is a block's largest magnitude.

    |decode − x| ≤ scale/14. Biased: use it with error feedback.

    Cost: 4 + 32/block bits per element. One pass over memory.

    Args:
        block: how many values share a scale, a multiple of 8; of 512 for full speed.

    >>> import torch
    >>> Int4().decode(Int4().encode(torch.tensor([7.0, -2.4, 0.0])), 3)
    tensor([ 7., -2.,  0.])

    Source: Wang et al., SDP4Bit, NeurIPS 2024; Douillard et al., Streaming DiLoCo, 2025 (4-bit outer gradients).
    """

    block: int = DEFAULT_BLOCK

    source: ClassVar[str] = "Wang et al., SDP4Bit, NeurIPS 2024"
    summary: ClassVar[str] = "15 equally spaced values, scaled by each block's largest magnitude"
    examples: ClassVar[tuple[str, ...]] = ("int4", "int4(64)", "int4(1032)")

    def magnitudes(self) -> Sequence[float]:
        return [k / 7 for k in range(8)]
