"""Elastic averaging: every worker is drawn to a centre, and the centre to the mean of the workers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.consistency.averaging import OwnWeights, average_buffers
from laconic.consistency.base import Mode, register
from laconic.consistency.local import check_period
from laconic.errors import BadInput
from laconic.exchange.policy import CodecPlan
from laconic.transports.world import World


@register("elastic")
@dataclass(frozen=True)
class Elastic(Mode):
    """Workers explore on their own, tied by a spring to a centre w̃, which is what is trained in the end.

    Every `period` steps, from the weights before the step, for worker i of m:
    wᵢ ← wᵢ − η∇f(wᵢ) − α(wᵢ − w̃),  w̃ ← (1−β)w̃ + (β/m) Σⱼ wⱼ; in between, wᵢ ← wᵢ − η∇f(wᵢ).
    −η∇f(wᵢ) stands for whatever the inner optimiser does.

    With `momentum` δ (EAMSGD), v ← δv − η∇f(wᵢ + δv) and wᵢ ← wᵢ + v take the place of the gradient step: between
    steps the model then holds wᵢ + δv, where the gradient is to be taken. The inner optimiser should have none itself.

    Cost: one all-reduce every `period` steps, of wᵢ − w̃, through the codec with error feedback. `finish` leaves w̃, the
    same bits on all workers, and the mean of the buffers.

    Args:
        alpha: how far a worker moves to the centre; none for β/m, with which both pulls are alike.
        beta: how far the centre moves to the mean of the workers.
        period: steps between two exchanges.
        momentum: δ, Nesterov's momentum; 0 for plain EASGD.
        asynchronous: a centre that each worker visits in its own time.

    Raises:
        BadInput: a value out of range.

    >>> str(Elastic(beta=0.8, period=4))
    'elastic(beta=0.8, period=4)'

    Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015, eq. 5 and 6, Alg. 2.
    Differs: the exchange before the first step is left out, for all weights are w̃ then. One worker has no centre: it is
    the plain optimiser.
    """

    alpha: float | None = None
    beta: float = 0.9
    period: int = 10
    momentum: float = 0.0
    asynchronous: bool = False

    summary: ClassVar[str] = "workers are drawn to a common centre, which is the result"
    source: ClassVar[str] = "Zhang, Choromanska and LeCun, Elastic Averaging SGD, NeurIPS 2015"
    examples: ClassVar[tuple[str, ...]] = ("elastic(period=4)",)
    same_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_period(self.period)
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise BadInput(f"elastic: alpha is from 0 to 1, got {self.alpha}")
        if not 0 < self.beta <= 1:
            raise BadInput(f"elastic: beta is above 0 and at most 1, got {self.beta}")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"elastic: momentum is at least 0 and below 1, got {self.momentum}")
        if self.asynchronous:
            raise BadInput("elastic: there is no asynchronous centre yet; leave asynchronous out")

    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> ElasticAgreement:
        return ElasticAgreement(self, model, optimizer, world, codec, **options)


class ElasticAgreement(OwnWeights):
    """Elastic at work.

    Attributes:
        alpha: α as it is used.
        centre: w̃, the same bits on all workers.
        velocity: v of EAMSGD; None without momentum.
    """

    def __init__(
        self,
        mode: Elastic,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        codec: CodecPlan,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, world, codec, **options)
        self.mode = mode
        self.alpha = mode.beta / world.world_size if mode.alpha is None else mode.alpha
        self.centre = self.weights.values.clone()
        self.velocity = torch.zeros_like(self.centre) if mode.momentum and not self.alone else None
        self._origin: Tensor | None = None  # the weights before this step, where they are needed after it
        self._pull: Tensor | None = None  # w − w̃ before this step, where it is one of exchange

    def before_step(self) -> None:
        if self.alone:
            return
        values = self.weights.values
        if self.velocity is not None:
            values.sub_(self.velocity, alpha=self.mode.momentum)  # from where the gradient was taken back to wᵢ
            self._origin = values.clone()
        if self.step > 0 and self.step % self.mode.period == 0:
            with self.agreeing():
                self._pull = values - self.centre
                mean = self._pull.clone()
                self.waited(self.averager.mean(mean))
                self.centre.add_(mean, alpha=self.mode.beta)

    def after_step(self) -> None:
        values = self.weights.values
        if self.velocity is not None and self._origin is not None:
            self.velocity.mul_(self.mode.momentum)
            values.add_(self.velocity)
            torch.sub(values, self._origin, out=self.velocity)  # δv − η∇f
        if self._pull is not None:
            values.sub_(self._pull, alpha=self.alpha)
        if self.velocity is not None:
            values.add_(self.velocity, alpha=self.mode.momentum)
        self._origin = self._pull = None
        self.settle()

    def finish(self) -> None:
        """The centre in every model, and the mean of the buffers."""
        if self.alone:
            return
        with self.agreeing():
            self.weights.values.copy_(self.centre)
            if self.velocity is not None:
                self.velocity.zero_()
            average_buffers(self.model, self.world)
        self.settle_finish()

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "centre": self.centre.clone()}
        return state if self.velocity is None else {**state, "velocity": self.velocity.clone()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.centre.copy_(state["centre"])
        if self.velocity is not None and "velocity" in state:
            self.velocity.copy_(state["velocity"])
