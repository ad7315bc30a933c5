"""The 8-bit dynamic tree: an exponent of as many bits as it needs, the rest a bisection tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.eightbit import DEFAULT_BLOCK, Levels, Tabulated, levels_table
from laconic.errors import BadInput

LEAST_UPPER = 0.6  # below, levels can lie closer than `levels_table` tells apart


@register("dynamic8")
@dataclass(frozen=True)
class Dynamic8(Tabulated):
    """Sends sign(x) · 10⁻ⁿ · t · scale: n leading zeros, a one, and 6 − n bits that choose t in (0.1, upper).

    The seven bits below the sign are 0ⁿ 1 b…b. The 2⁶⁻ⁿ values of t are the centres of the equal parts into which
    bisection cuts (0.1, upper): t = 0.1 + (upper − 0.1)(b + ½)/2⁶⁻ⁿ. Seven zeros are 0. The scale is the largest
    magnitude in each `block`; x/scale goes to the nearest of the 255 values, halfway to the one of larger magnitude.
    A zero stays zero, and the largest magnitude comes back 0.7 % small (0.9930).

    Cost: 8 + 32/block bits per element. Mean relative error on N(0, 1): 1.7 % in blocks of 4096, 1.9 % whole.

    Args:
        block: how many values share a scale; None, the whole tensor (as in the paper).
        upper: the upper end of the bisected interval, 0.6 to 1. 1 covers every value and is what the paper's text says
            and its Table 1 needs. Its two worked examples, 0.2345678 → 0.236719 and 0.0000234 → 0.000019, are those of
            0.8.

    Raises:
        BadInput: an argument is none of these.
        NonFiniteError: on encoding NaN or infinity.

    >>> import torch
    >>> Dynamic8().decode(Dynamic8().encode(torch.tensor([0.0, 0.0312, -1.0])), 3)
    tensor([ 0.0000,  0.0311, -0.9930])

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §3.1.
    Differs: blocks, where the paper scales the whole tensor.
    """

    block: int | None = DEFAULT_BLOCK
    upper: float = 1.0

    summary: ClassVar[str] = "8-bit dynamic tree: decimal exponent in unary, bisection below it, scaled per block"
    examples: ClassVar[tuple[str, ...]] = ("dynamic8", "dynamic8(none)", "dynamic8(64)", "dynamic8(none, upper=0.8)")

    def __post_init__(self) -> None:
        super().__post_init__()
        if type(self.upper) not in (int, float) or not LEAST_UPPER <= self.upper <= 1:
            raise BadInput(f"dynamic8: upper must lie between {LEAST_UPPER} and 1, got {self.upper!r}")

    @property
    def wire_name(self) -> str:
        """The name that the header's codec id is made of: codes of another `upper` mean other values."""
        return self.name if self.upper == 1 else f"{self.name}-{float(self.upper)}"

    def _levels(self) -> Levels:
        return _table(float(self.upper))


@cache
def _table(upper: float) -> Levels:
    levels = [0.0]
    for n in range(6, -1, -1):
        parts = 1 << (6 - n)
        levels += [(0.1 + (upper - 0.1) * (part + 0.5) / parts) / 10**n for part in range(parts)]
    return levels_table(levels)
