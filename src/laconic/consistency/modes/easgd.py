"""Elastic averaging: every worker is drawn to a centre, and the centre to the mean of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.consistency.averaging import WEIGHT_OPTIONS, Averager, Averaging
from laconic.consistency.base import Mode, Setup, check_whole, register
from laconic.consistency.servers.served import Centre
from laconic.consistency.weights import average_buffers
from laconic.errors import BadInput


@register("easgd")
@dataclass(frozen=True)
class Easgd(Mode):
    """Workers explore on their own, tied by a spring to a centre w̃, which is what is trained in the end.

    Every `period` steps, from the weights before the step, for worker i of m:
    wᵢ ← wᵢ − η∇f(wᵢ) − α(wᵢ − w̃),  w̃ ← (1−β)w̃ + (β/m) Σⱼ wⱼ; in between, wᵢ ← wᵢ − η∇f(wᵢ).
    −η∇f(wᵢ) stands for whatever the inner optimiser does.

    With `momentum` δ (EAMSGD), v ← δv − η∇f(wᵢ + δv) and wᵢ ← wᵢ + v take the place of the gradient step: between
    steps the model then holds wᵢ + δv, where the gradient is to be taken. The inner optimiser should have none itself.

    Asynchronous, w̃ lies on servers, sharded over all workers, and each worker visits it every `period` of its own
    steps: wᵢ as above, w̃ ← w̃ + α(wᵢ − w̃). A slow worker holds up nobody; staleness counts the visits of others.

    Cost: one all-reduce every `period` steps, of wᵢ − w̃, through the codec; asynchronous, w̃ is
    read, exactly, and the difference sent through the codec. `finish` leaves w̃, the same bits on all workers, and the
    mean of the buffers.

    Args:
        alpha: how far a worker moves to the centre; none for β/m, with which both pulls are alike.
        beta: how far the centre moves to the mean of the workers; asynchronous, only α's default depends on it.
        period: steps between two exchanges.
        momentum: δ, Nesterov's momentum; 0 for plain EASGD.
        asynchronous: each worker visits the centre in its own time.

    Raises:
        BadInput: a value out of range.

    >>> str(Easgd(beta=0.8, period=4))
    'easgd(beta=0.8, period=4)'

    Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015, eq. 5, 6, Alg. 1, 2.
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
    examples: ClassVar[tuple[str, ...]] = (
        "easgd(period=4, momentum=0.3)",
        "easgd(period=4, momentum=0.3, asynchronous=true)",
    )
    options: ClassVar[tuple[str, ...]] = WEIGHT_OPTIONS
    same_weights: ClassVar[bool] = False

    @property
    def lockstep(self) -> bool:
        return not self.asynchronous

    def __post_init__(self) -> None:
        check_whole("easgd", {"period": self.period}, 1, "a number of steps")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise BadInput(f"easgd: alpha is from 0 to 1, got {self.alpha}")
        if not 0 < self.beta <= 1:
            raise BadInput(f"easgd: beta is above 0 and at most 1, got {self.beta}")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"easgd: momentum is at least 0 and below 1, got {self.momentum}")

    def install(self, setup: Setup) -> EasgdAgreement:
        return EasgdAgreement(self, setup)


class EasgdAgreement(Averaging):
    """Easgd at work.

    Attributes:
        alpha: α as it is used.
        centre: w̃, and how it is moved.
        velocity: v of EAMSGD; None without momentum.
    """

    def __init__(self, mode: Easgd, setup: Setup) -> None:
        super().__init__(setup, feedback=False)
        self.mode = mode
        self.alpha = mode.beta / setup.world.world_size if mode.alpha is None else mode.alpha
        if mode.asynchronous and not self.alone:
            served = Centre(setup.world, self.weights.values, setup.codec)
            self.centre: _Meeting | _Visited = _Visited(served, self.alpha)
        else:
            self.centre = _Meeting(self.averager, self.weights.values, mode.beta)
        self.velocity = torch.zeros_like(self.weights.values) if mode.momentum and not self.alone else None
        self._origin: Tensor | None = None  # the weights before this step, where they are needed after it
        self._pull: Tensor | None = None  # w − w̃ before this step, where it is one of exchange

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + self.centre.sent_nbytes

    def before_step(self) -> None:
        self._stale = 0
        if self.alone:
            return
        values = self.weights.values
        if self.velocity is not None:
            values.sub_(self.velocity, alpha=self.mode.momentum)  # from where the gradient was taken back to wᵢ
            self._origin = values.clone()
        if self.step > 0 and self.step % self.mode.period == 0:
            with self.agreeing():
                self._pull, wait_s, self._stale = self.centre.meet(values, self.step)
                self.waited(wait_s)

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
        self.settle(self._stale)

    def finish(self) -> None:
        """The centre in every model, and the mean of the buffers."""
        if self.alone:
            return
        with self.agreeing():
            self.weights.values.copy_(self.centre.finish())
            if self.velocity is not None:
                self.velocity.zero_()
            average_buffers(self.model, self.world)
        self.settle_finish()

    def state_dict(self) -> dict[str, Any]:
        state = {**super().state_dict(), "centre": self.centre.state_dict()}
        return state if self.velocity is None else {**state, "velocity": self.velocity.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.centre.load_state_dict(state["centre"])
        if self.velocity is not None and "velocity" in state:
            self.velocity.copy_(state["velocity"])

    def close(self) -> None:
        self.centre.close()
        super().close()


class _Meeting:
    """A centre that all workers hold, the same bits, and move together."""

    sent_nbytes = 0  # the world counts what it sends

    def __init__(self, averager: Averager, start: Tensor, beta: float) -> None:
        self.averager, self.beta = averager, beta
        self.values = start.clone()

    def meet(self, values: Tensor, step: int) -> tuple[Tensor, float, int]:
        """w − w̃, and move w̃; the seconds waited, and the staleness."""
        pull = values - self.values
        mean = pull.clone()
        wait_s = self.averager.mean(mean)
        self.values.add_(mean, alpha=self.beta)
        return pull, wait_s, 0

    def finish(self) -> Tensor:
        return self.values

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.clone()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values.copy_(state["values"])

    def close(self) -> None:
        """It has nothing to give back."""


class _Visited:
    """A centre on servers, moved by whoever visits it."""

    def __init__(self, served: Centre, alpha: float) -> None:
        self.served, self.alpha = served, alpha

    @property
    def sent_nbytes(self) -> int:
        return self.served.sent_nbytes

    def meet(self, values: Tensor, step: int) -> tuple[Tensor, float, int]:
        """As for `_Meeting`."""
        waited = self.served.wait_s
        self.served.pull()
        pull = values - self.served.values
        self.served.add(self.alpha * pull, step)
        return pull, self.served.wait_s - waited, self.served.staleness

    def finish(self) -> Tensor:
        self.served.finish()
        return self.served.values

    def state_dict(self) -> dict[str, Any]:
        return self.served.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.served.load_state_dict(state)

    def close(self) -> None:
        self.served.close()
