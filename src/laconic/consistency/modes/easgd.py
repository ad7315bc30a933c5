"""Elastic averaging: every worker is drawn to a centre, and the centre to the mean of the workers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.codecs.plans import CodecPlan
from laconic.consistency.averaging import WEIGHT_OPTIONS, Averager, Buffers, OwnWeights, average_buffers
from laconic.consistency.base import Mode, Setup, check_whole, register
from laconic.consistency.servers.messages import Coder
from laconic.consistency.servers.requests import Serving
from laconic.consistency.servers.served import Served
from laconic.consistency.servers.shards import ShardLayout
from laconic.errors import BadInput
from laconic.storage.form import check_like
from laconic.transports.world import World


@register("easgd")
@dataclass(frozen=True)
class Easgd(Mode):
    """Workers explore on their own, tied by a spring to a centre w̃, which is the trained model.

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

    @property
    def lead(self) -> int | None:
        return None if self.asynchronous else self.period + 1  # the first meeting is in the step after a period

    def outlives(self, rank: int, world_size: int) -> bool:
        return self.asynchronous

    def __post_init__(self) -> None:
        check_whole("easgd", {"period": self.period}, 1, "a number of steps")
        if self.alpha is not None and not 0 <= self.alpha <= 1:
            raise BadInput(f"easgd: alpha is from 0 to 1, got {self.alpha}")
        if not 0 < self.beta <= 1:
            raise BadInput(f"easgd: beta is above 0 and at most 1, got {self.beta}")
        if not 0 <= self.momentum < 1:
            raise BadInput(f"easgd: momentum is at least 0 and below 1, got {self.momentum}")

    @property
    def own_options(self) -> tuple[str, ...]:  # type: ignore[override]
        return () if self.asynchronous else ("masters",)

    def install(self, setup: Setup) -> EasgdAgreement:
        return EasgdAgreement(self, setup)


class EasgdAgreement(OwnWeights):
    """Easgd at work."""

    def __init__(self, mode: Easgd, setup: Setup) -> None:
        super().__init__(setup)
        self.mode, averager = mode, self.make_averager(setup, feedback=False)
        self.alpha = mode.beta / setup.world.world_size if mode.alpha is None else mode.alpha
        if mode.asynchronous and not self.alone:
            buffers = Buffers(setup.model)
            centre = Centre(setup.world, self.weights.values, setup.codec, self.alpha, buffers)
            self.centre: _Meeting | Centre = centre
            self.liveness = centre.served.losses
        else:
            self.centre = _Meeting(averager, self.weights.values, mode.beta)
        self.parts["centre"] = self.centre
        self.resources.callback(self.centre.close)
        self.velocity = torch.zeros_like(self.weights.values) if mode.momentum and not self.alone else None
        self._origin: Tensor | None = None  # the weights before this step, where they are needed after it
        self._pull: Tensor | None = None  # w − w̃ before this step, where it is one of exchange

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + self.centre.sent_nbytes

    def before_step(self) -> None:
        self._stale = 0
        meets = self.step > 0 and self.step % self.mode.period == 0
        if self.alone or (self.velocity is None and not meets):
            return
        with self.weights.current() as values:
            if self.velocity is not None:
                values.sub_(self.velocity, alpha=self.mode.momentum)  # from where the gradient was taken back to wᵢ
                self._origin = values.clone()
            if meets:
                with self.agreeing():
                    self._pull, wait_s, self._stale = self.centre.meet(values, self.step)
                    self.waited(wait_s)

    def after_step(self) -> None:
        if self._origin is not None or self._pull is not None:
            with self.weights.current() as values:
                self._move(values)
        self._origin = self._pull = None
        self.settle(self._stale)

    def _move(self, values: Tensor) -> None:
        """Add momentum and the pull of the centre to what the inner optimiser did."""
        if self.velocity is not None and self._origin is not None:
            self.velocity.mul_(self.mode.momentum)
            values.add_(self.velocity)
            torch.sub(values, self._origin, out=self.velocity)  # δv − η∇f
        if self._pull is not None:
            values.sub_(self._pull, alpha=self.alpha)
        if self.velocity is not None:
            values.add_(self.velocity, alpha=self.mode.momentum)

    def finish(self) -> None:
        """Leave the centre, and the mean of the buffers, in every model."""
        if self.alone:
            return
        with self.agreeing(), self.weights.current() as values:
            values.copy_(self.centre.finish())
            if self.velocity is not None:
                self.velocity.zero_()
            if isinstance(self.centre, _Meeting):
                average_buffers(self.model, self.world)
        self.settle_finish()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return state if self.velocity is None else {**state, "velocity": self.velocity.clone()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        if self.velocity is not None:
            check_like(state, {"velocity": self.velocity}, "the state of easgd")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.velocity is not None:
            self.velocity.copy_(state["velocity"])


class _Meeting:
    """A centre that every worker holds, with the same bits, and that all move together."""

    sent_nbytes = 0  # the world counts what it sends

    def __init__(self, averager: Averager, start: Tensor, beta: float) -> None:
        self.averager, self.beta = averager, beta
        self.values = start.clone()

    def meet(self, values: Tensor, step: int) -> tuple[Tensor, float, int]:
        """Return w − w̃, the seconds waited and the staleness; moves w̃."""
        pull = values - self.values
        mean = pull.clone()
        wait_s = self.averager.mean(mean)
        self.values.add_(mean, alpha=self.beta)
        return pull, wait_s, 0

    def finish(self) -> Tensor:
        return self.values

    def state_dict(self) -> dict[str, Any]:
        return {"values": self.values.clone()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_like(state, {"values": self.values}, "the state of easgd's centre")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.values.copy_(state["values"])

    def close(self) -> None:
        """Do nothing: there is nothing to close."""


class Centre:
    """A centre on servers, which every worker visits in its own time.

    What a codec leaves out stays in wᵢ − w̃ and is there at the next visit, so there is no error feedback: it would
    count twice. Additions of several workers commute, and each is applied once.

    Every shard of it has a copy, so that it outlives any worker.

    Args:
        start: w̃ to begin with, the same on all workers; it is copied.
        buffers: the model's, which are averaged by `finish`.
    """

    def __init__(
        self, world: World, start: Tensor, codec: CodecPlan, alpha: float = 1.0, buffers: Buffers | None = None
    ) -> None:
        self.values, self.alpha, self.buffers = start.clone(), alpha, buffers or Buffers(nn.Module())
        layout, coder = ShardLayout(world.world_size, None, 1, start.numel()), Coder(codec, world, feedback=False)
        self.served = Served(world, layout, self.values, Serving("easgd", merge=self.buffers.mean), coder)
        self._added = 0

    @property
    def sent_nbytes(self) -> int:
        return self.served.sent_nbytes

    def meet(self, values: Tensor, step: int) -> tuple[Tensor, float, int]:
        """As for `_Meeting`: two messages a shard, of which one reads w̃ and one adds α(w − w̃) to it."""
        client = self.served.client
        waited = client.wait_s
        self.pull()
        pull = values - self.values
        self.add(self.alpha * pull, step)
        return pull, client.wait_s - waited, client.staleness

    def pull(self) -> None:
        """Bring `values` up to date."""
        self.served.client.pull()
        self.served.client.wait()

    def add(self, difference: Tensor, step: int) -> None:
        """Add to the centre; returns at once, having waited for the answer to the addition before."""
        self.served.client.wait(most=1)
        self._added += 1
        self.served.push(difference, self._added, step, wants_weights=False)

    def finish(self) -> Tensor:
        """Wait until all workers have called it; w̃ and the buffers are then the same on all."""
        self.served.client.wait()
        self._added = max(self._added, self.served.finish(self.buffers))
        return self.values

    def state_dict(self) -> dict[str, Any]:
        return {**self.served.state_dict(), "added": self._added}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_like(state, {"added": 0}, "the state of easgd's centre")
        self.served.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.served.load_state_dict(state)
        self._added = max(self._added, int(state["added"]))  # the servers' clocks never go back

    def close(self) -> None:
        self.served.close()
