"""ParallelSGD: workers train apart to the end, and their weights are averaged once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Agreement, Mode, register
from laconic.errors import BadInput
from laconic.exchange.policy import CodecPlan
from laconic.transports.world import World


@register("once")
@dataclass(frozen=True)
class Once(Mode):
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
    same_weights: ClassVar[bool] = False

    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> Agreement:
        if str(codec) != "none":
            raise BadInput(f"once averages a single time, exactly: nothing would make up for what '{codec}' leaves out")
        if options:
            raise BadInput(f"once has no options, got {', '.join(options)}")
        return OnceAgreement(model, optimizer, world)


class OnceAgreement(OwnWeights):
    """Once at work."""

    def after_step(self) -> None:
        self.settle()

    def finish(self) -> None:
        """The exact mean of all workers' weights and buffers."""
        self.average_all()
