"""Blockwise model-update filtering: model averaging whose means are smoothed by a momentum of their own."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.consistency.averaging import OwnWeights, average_buffers, check_state_rule, consolidate_state
from laconic.consistency.base import Mode, register
from laconic.consistency.modes.local import check_period
from laconic.errors import BadInput
from laconic.exchange.policy import CodecPlan
from laconic.transports.world import World


@register("block_momentum")
@dataclass(frozen=True)
class BlockMomentum(Mode):
    """Every worker trains alone for a block of `period` steps; the blocks' means move one global model, with momentum.

    With w̄ the mean of all workers' weights after a block that began at w_g:
    G = w̄ − w_g,  Δ ← μΔ + ζG,  w ← w + Δ; the next block begins at w_g = w, or at w_g = w + μΔ with `nesterov`.

    Without momentum this is `local`. A mean of m workers moves as far as one worker would, although it has seen m times
    the samples; μ = 1 − 1/m, the default, makes up for it: Δ sums to m times the block's gradient in the long run.

    Cost: one all-reduce every `period` steps, of G, through the codec with error feedback. `finish` ends the block
    under way and leaves w.

    Args:
        period: steps a block.
        momentum: μ; none for 1 − 1/m. With one worker it is 0 whatever is given: the plain optimiser.
        nesterov: begin blocks where the momentum will carry the global model.
        learning_rate: ζ, the block learning rate.
        state: the optimiser's state at the end of a block: keep, average or forget (the paper's) it; see `local`.

    Raises:
        BadInput: a value out of range.

    >>> str(BlockMomentum(16, momentum=0.5))
    'block_momentum(16, momentum=0.5)'

    Source: Chen and Huo, Scalable Training of Deep Learning Machines by Incremental Block Training with Intra-Block
    Parallel Optimization and Blockwise Model-Update Filtering, ICASSP 2016, eq. 3 to 6.
    Differs: a block is a number of steps, not a share of the data.
    """

    period: int = 8
    momentum: float | None = None
    nesterov: bool = False
    learning_rate: float = 1.0
    state: str = "forget"

    summary: ClassVar[str] = "weights are averaged every few steps, with a momentum of the means"
    source: ClassVar[str] = "Chen and Huo, Blockwise Model-Update Filtering, ICASSP 2016"
    examples: ClassVar[tuple[str, ...]] = ("block_momentum(8)",)
    same_weights: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_period(self.period)
        check_state_rule(self.state)
        if self.momentum is not None and not 0 <= self.momentum < 1:
            raise BadInput(f"block momentum is at least 0 and below 1, got {self.momentum}")
        if not self.learning_rate > 0:
            raise BadInput(f"the block learning rate is above zero, got {self.learning_rate}")

    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> BlockMomentumAgreement:
        return BlockMomentumAgreement(self, model, optimizer, world, codec, **options)


class BlockMomentumAgreement(OwnWeights):
    """BlockMomentum at work.

    Attributes:
        start: where this block began, w_g.
        update: the last global update Δ.
        momentum: μ as it is used.
    """

    def __init__(
        self,
        mode: BlockMomentum,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        codec: CodecPlan,
        **options: Any,
    ) -> None:
        super().__init__(model, optimizer, world, codec, **options)
        self.mode = mode
        self.momentum = 1 - 1 / world.world_size if mode.momentum is None else mode.momentum
        self.start = self.weights.values.clone()
        self.update = torch.zeros_like(self.start)
        self._steps_in_block = 0

    def after_step(self) -> None:
        self._steps_in_block += 1
        if not self.alone and self._steps_in_block == self.mode.period:
            with self.agreeing():
                self._end_block()
                consolidate_state(self.mode.state, self.optimizer, self.weights, self.world)
                self._begin_block()
        self.settle()

    def _end_block(self) -> None:
        """Put the global model w into every model; a failed exchange leaves the weights as they were."""
        values = self.weights.values
        gradient = values - self.start
        self.waited(self.averager.mean(gradient))
        carried = self.momentum * self.update
        torch.add(carried, gradient, alpha=self.mode.learning_rate, out=self.update)
        torch.add(self.start, self.update, out=values)
        if self.mode.nesterov:
            values.sub_(carried)  # the block began so far ahead of w

    def _begin_block(self) -> None:
        if self.mode.nesterov:
            self.weights.values.add_(self.update, alpha=self.momentum)
        self.start.copy_(self.weights.values)
        self._steps_in_block = 0

    def finish(self) -> None:
        """The global model, with all steps in it, and the mean of the buffers."""
        if self.alone:
            return
        with self.agreeing():
            if self._steps_in_block:
                self._end_block()
            elif self.mode.nesterov:
                self.weights.values.sub_(self.update, alpha=self.momentum)
            self.start.copy_(self.weights.values)
            self.update.zero_()
            self._steps_in_block = 0
            average_buffers(self.model, self.world)
        self.settle_finish()

    def state_dict(self) -> dict[str, Any]:
        held = {"start": self.start.clone(), "update": self.update.clone(), "steps_in_block": self._steps_in_block}
        return {**super().state_dict(), **held}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.start.copy_(state["start"])
        self.update.copy_(state["update"])
        self._steps_in_block = int(state["steps_in_block"])
