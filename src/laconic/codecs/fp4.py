"""4-bit floats with a scale a block."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.fourbit import DEFAULT_BLOCK, FourBit
from laconic.errors import UnknownName

_MAGNITUDES = {
    "e2m1": (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0),
    "e3m0": (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 16.0),
}


@register("fp4")
@dataclass(frozen=True)
class Fp4(FourBit):
    """Sends x·largest/scale rounded to the nearest 4-bit float, ties to even; scale is a block's largest magnitude.

    `e2m1`: magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; `e3m0`: 0 and the powers of two from 0.25 to 16, so that values down
    to 1/64 of a block's largest are told apart. An error is at most 1/6 (e2m1) or 1/4 (e3m0) of the scale.

    Cost: 4 + 32/block bits per element. One pass over memory.

    Args:
        format: "e2m1" (finer) or "e3m0" (wider).
        block: how many values share a scale, a multiple of 8; of 512 for full speed.

    >>> import torch
    >>> Fp4().decode(Fp4().encode(torch.tensor([6.0, -2.4, 0.3])), 3)
    tensor([ 6.0000, -2.0000,  0.5000])

    Source: Open Compute Project, Microscaling Formats, 2023 (e2m1); Douillard et al., Streaming DiLoCo, 2025, §2.3
    (e3m0 for outer gradients).
    Differs: a float32 scale for `block` values, not a power of two for 32.
    """

    format: str = "e2m1"
    block: int = DEFAULT_BLOCK

    source: ClassVar[str] = "OCP Microscaling Formats 2023; Streaming DiLoCo 2025"
    summary: ClassVar[str] = "4-bit floats, e2m1 or e3m0, scaled per block"
    examples: ClassVar[tuple[str, ...]] = ("fp4", "fp4(e3m0)", "fp4(e2m1, block=64)", "fp4(e3m0, block=1032)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in _MAGNITUDES:
            raise UnknownName("fp4 format", str(self.format), _MAGNITUDES)

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of: the two formats' codes mean different values."""
        return f"{self.name}-{self.format}"

    def magnitudes(self) -> Sequence[float]:
        values = _MAGNITUDES[self.format]
        return [value / values[-1] for value in values]
