"""The 8-bit mantissa type: three bits of decimal exponent, four bits of mantissa."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import ClassVar

from laconic.codecs.base import register
from laconic.codecs.eightbit import DEFAULT_BLOCK, Levels, Tabulated, check_offset, levels_table


@register("mantissa8")
@dataclass(frozen=True)
class Mantissa8(Tabulated):
    """Sends sign(x) · m · 10⁻ⁿ · scale/15, m in 0 … 15 and n in 0 … 7.

    x goes to the nearest of these values, halfway to the one of larger magnitude. The scale is, by default, the
    largest magnitude in each `block`, which is thus m = 15, n = 0 and exact. With an `offset` it is 15 · 10^offset for
    all values, so that the levels are m · 10^(offset − n) as in the paper, and `block` plays no part: magnitudes above
    it are sent as 15 · 10^offset.

    Cost: 8 + 32/block bits per element; with an offset, 8.

    Args:
        block: how many values share a scale; None, the whole tensor.
        offset: the exponent offset, −30 … 30; None, scale by the largest magnitude. The paper's is 1, for N(0, 10²) 2.

    Raises:
        NonFiniteError: on encoding NaN or infinity.

    >>> import torch
    >>> Mantissa8(offset=0).decode(Mantissa8(offset=0).encode(torch.tensor([0.0, 0.2345678, -99.0])), 3)
    tensor([  0.0000,   0.2000, -15.0000])

    Source: Dettmers, 8-Bit Approximations for Parallelism in Deep Learning, ICLR 2016, §3.1.
    Differs: of the 128 pairs (n, m) 114 are different numbers (1 is 10 · 10⁻¹); the seven bits are the number's rank
    among them, not the two fields. Scaling by blocks is ours.
    """

    block: int | None = DEFAULT_BLOCK
    offset: int | None = None

    summary: ClassVar[str] = "8-bit mantissa: 3-bit decimal exponent, 4-bit mantissa, scaled per block or by offset"
    examples: ClassVar[tuple[str, ...]] = ("mantissa8", "mantissa8(none)", "mantissa8(64)", "mantissa8(offset=1)")

    def __post_init__(self) -> None:
        super().__post_init__()
        check_offset(self.name, self.offset)

    def _fixed_scale(self) -> float | None:
        return None if self.offset is None else 15 * 10.0**self.offset

    def _levels(self) -> Levels:
        return _table()


@cache
def _table() -> Levels:
    # In units of 10⁻⁷ the numbers are whole, so that equal ones are seen to be equal.
    numbers = sorted({m * 10**e for e in range(8) for m in range(16)})
    return levels_table([number / (15 * 10**7) for number in numbers])
