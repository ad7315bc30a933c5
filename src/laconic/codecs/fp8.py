"""8-bit floats, e4m3 and e5m2, scaled per block so that gradients fit their narrow range."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.eightbit import DEFAULT_BLOCK
from laconic.codecs.tables8 import Levels, Tabulated, levels_table
from laconic.errors import UnknownName

_MANTISSA_BITS = {"e4m3": 3, "e5m2": 2}


@register("fp8")
@dataclass(frozen=True)
class Fp8(Tabulated):
    """Sends x · largest/scale rounded to the nearest 8-bit float, ties to even; scale is a block's largest magnitude.

    `e4m3`: 4 exponent bits, 3 mantissa bits, largest 448, smallest 2⁻⁹; `e5m2`: 5 and 2, 57344 and 2⁻¹⁶. Unscaled,
    gradients below 2⁻¹⁰ would vanish in e4m3; scaled, 9.6 decimal orders below a block's largest value remain in e5m2
    and 5.4 in e4m3. An error is at most 2⁻³ (e5m2) or 2⁻⁴ of |x| down to the least normal number, 2⁻¹⁴ of 57344 or 2⁻⁶
    of 448; below it the absolute error shrinks no further. The codes are the formats' own bit patterns; those of NaN
    and infinity are never sent.

    Cost: 8 + 32/block bits per element.

    Args:
        format: "e4m3" (finer) or "e5m2" (wider).
        block: how many values share a scale; None, the whole tensor.

    >>> import torch
    >>> Fp8().decode(Fp8().encode(torch.tensor([0.0, 0.5, 448.0])), 3)
    tensor([  0.0000,   0.5000, 448.0000])

    Source: Micikevicius et al., FP8 Formats for Deep Learning, 2022.
    """

    format: str = "e4m3"
    block: int | None = DEFAULT_BLOCK

    source: ClassVar[str] = "Micikevicius et al., FP8 Formats for Deep Learning, 2022"
    summary: ClassVar[str] = "8-bit floats, e4m3 or e5m2, scaled per block"
    examples: ClassVar[tuple[str, ...]] = ("fp8", "fp8(e5m2)", "fp8(e4m3, block=none)", "fp8(e5m2, block=64)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.format not in _MANTISSA_BITS:
            raise UnknownName("fp8 format", str(self.format), _MANTISSA_BITS)

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of: the two formats' codes mean different values."""
        return f"{self.name}-{self.format}"

    def table(self) -> Levels:
        return _table(self.format)


@cache
def _table(format: str) -> Levels:
    mantissa_bits = _MANTISSA_BITS[format]
    bias = 2 ** (6 - mantissa_bits) - 1
    last = {"e4m3": 0x7E, "e5m2": 0x7B}[format]  # above: NaN in e4m3, infinity and NaN in e5m2

    def value(code: int) -> float:
        exponent, mantissa = divmod(code, 2**mantissa_bits)
        if exponent == 0:
            return math.ldexp(mantissa, 1 - bias - mantissa_bits)
        return math.ldexp(2**mantissa_bits + mantissa, exponent - bias - mantissa_bits)

    return levels_table([value(code) / value(last) for code in range(last + 1)], ties_to_even=True)
