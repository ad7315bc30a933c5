"""The 8-bit static tree: three bits of decimal exponent, four bits of bisection tree."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.eightbit import DEFAULT_BLOCK, Levels, Tabulated, check_offset, levels_table


@register("static8")
@dataclass(frozen=True)
class Static8(Tabulated):
    """Sends sign(x) · 10⁻ⁿ · t · scale, n in 0 … 7, t one of the 16 centres of the equal parts of (0.1, 1).

    The seven bits below the sign are 7 − n in three and b in four, t = 0.1 + 0.9(b + ½)/16. x/scale goes to the
    nearest level, halfway to the one of larger magnitude. The scale is, by default, the largest magnitude in each
    `block`. With an `offset` it is 10^offset for all values, as in the paper, and `block` plays no part: magnitudes
    above it are sent as the largest level, 0.97 · 10^offset.

    Cost: 8 + 32/block bits per element; with an offset, 8.

    Args:
        block: how many values share a scale; None, the whole tensor.
        offset: the exponent offset, −30 … 30; None, scale by the largest magnitude. The paper's is 1, for N(0, 10²) 2.

    Raises:
        NonFiniteError: on encoding NaN or infinity.

    >>> import torch
    >>> Static8(offset=1).decode(Static8(offset=1).encode(torch.tensor([0.0, 0.2345678, -99.0])), 3)
    tensor([ 0.0000,  0.2406, -9.7188])

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §3.1.
    Differs: the smallest level, 1.3 · 10⁻⁸, is 0, so that zeros stay zeros; scaling by blocks is ours.
    """

    block: int | None = DEFAULT_BLOCK
    offset: int | None = None

    summary: ClassVar[str] = "8-bit static tree: 3-bit decimal exponent, 4-bit bisection, scaled per block or by offset"
    examples: ClassVar[tuple[str, ...]] = ("static8", "static8(none)", "static8(64)", "static8(offset=1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_offset(self.name, self.offset)

    def _fixed_scale(self) -> float | None:
        return None if self.offset is None else 10.0**self.offset

    def _levels(self) -> Levels:
        return _table()


@cache
def _table() -> Levels:
    levels = [(0.1 + 0.9 * (part + 0.5) / 16) / 10**n for n in range(7, -1, -1) for part in range(16)]
    return levels_table([0.0, *levels[1:]])
