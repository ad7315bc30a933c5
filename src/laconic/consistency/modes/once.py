"""ParallelSGD: workers train apart to the end, and their weights are averaged once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.consistency.base import register
from laconic.consistency.blocks import BlockMode


@register("once")
@dataclass(frozen=True)
class Once(BlockMode):
    """Every worker trains alone from the same start; `finish` leaves the mean of all weights in every model.

    w = (1/m) Σᵢ wᵢ, at the end only. On convex problems this mean is better than any single wᵢ; deep networks that
    trained long apart may lie in different valleys, and their mean in none.

    Cost: one exact all-reduce of the weights in all. A codec is refused: there is no later exchange to make up for what
    it leaves out.

    Raises:
        BadInput: from install: a codec other than "none", or an option.

    >>> str(Once())
    'once'

    Source: Zinkevich et al., Parallelized Stochastic Gradient Descent, NeurIPS 2010, Alg. 3.
    """

    summary: ClassVar[str] = "weights are averaged once, at the end"
    source: ClassVar[str] = "Zinkevich et al., Parallelized Stochastic Gradient Descent, NeurIPS 2010"
    examples: ClassVar[tuple[str, ...]] = ("once",)
    options: ClassVar[tuple[str, ...]] = ()

    @property
    def no_codec(self) -> str:
        return "it averages a single time, exactly, and nothing would make up for what a codec leaves out"
