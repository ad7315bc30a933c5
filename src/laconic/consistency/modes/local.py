"""Model averaging every k steps: workers train apart and meet for the mean of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.consistency.base import register
from laconic.consistency.blocks import BlockMode


@register("local")
@dataclass(frozen=True)
class Local(BlockMode):
    """Every worker trains alone for `period` steps; then all go on from the mean of their weights.

    wᵢ ← wᵢ − η∇f(wᵢ) at every step; after every `period`-th, wᵢ ← (1/m) Σⱼ wⱼ over the m workers. With a codec, what
    is sent is the difference to the last mean w̄, with error feedback: w̄ ← w̄ + (1/m) Σⱼ C(wⱼ − w̄), wᵢ ← w̄.

    Cost: one all-reduce of the weights every `period` steps: 1/period of the bytes of `sync`. `finish` leaves the exact
    mean, whatever the codec.

    Args:
        period: steps between two means.
        state: what becomes of the optimiser's state (momentum, Adam's moments) at a mean: keep each worker's own,
            average it (as many bytes again for each tensor in it), or forget it.

    Raises:
        BadInput: period is not a whole number above zero, or there is no such rule for the state.

    >>> str(Local(16))
    'local(16)'

    Source: Zinkevich et al., Parallelized SGD, NeurIPS 2010; McMahan et al., FedAvg, AISTATS 2017; Stich, Local SGD
    Converges Fast and Communicates Little, ICLR 2019.
    """

    period: int = 8
    state: str = "keep"

    summary: ClassVar[str] = "weights are averaged every few steps"
    source: ClassVar[str] = "Stich, Local SGD Converges Fast and Communicates Little, ICLR 2019"
    examples: ClassVar[tuple[str, ...]] = ("local(8)",)

    def __post_init__(self) -> None:
        self.check_block()
