"""Model averaging every k steps: workers train apart and meet for the mean of their weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.consistency.averaging import OwnWeights, check_state_rule, consolidate_state
from laconic.consistency.base import Mode, register
from laconic.errors import BadInput
from laconic.exchange.policy import CodecPlan
from laconic.transports.world import World


@register("local")
@dataclass(frozen=True)
class Local(Mode):
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
    same_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_period(self.period)
        check_state_rule(self.state)

    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> LocalAgreement:
        return LocalAgreement(self, model, optimizer, world, codec, **options)


def check_period(period: object) -> None:
    """Refuse a period that is not a whole number above zero."""
    if not isinstance(period, int) or isinstance(period, bool) or period < 1:
        raise BadInput(f"period is a number of steps above zero, got {period!r}")


class LocalAgreement(OwnWeights):
    """Local at work.

    Attributes:
        mean: the weights at the last mean, which differences are taken to; None where the codec is "none".
    """

    def __init__(
        self,
        mode: Local,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        codec: CodecPlan,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, world, codec, **options)
        self.mode = mode
        self.mean = None if self.averager.exact else self.weights.values.clone()

    def after_step(self) -> None:
        if not self.alone and (self.step + 1) % self.mode.period == 0:
            with self.agreeing():
                self.average()
                consolidate_state(self.mode.state, self.optimizer, self.weights, self.world)
        self.settle()

    def average(self) -> None:
        """Put the mean of all workers' weights into every model; a failed exchange leaves the weights as they were."""
        values = self.weights.values
        moved = values.clone() if self.mean is None else values - self.mean
        self.waited(self.averager.mean(moved))
        if self.mean is None:
            values.copy_(moved)
        else:
            values.copy_(self.mean.add_(moved))

    def finish(self) -> None:
        """The exact mean of all workers' weights and buffers."""
        self.average_all()
        if self.mean is not None:
            self.mean.copy_(self.weights.values)

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict()}
        return state if self.mean is None else {**state, "mean": self.mean.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        if self.mean is not None and "mean" in state:
            self.mean.copy_(state["mean"])
