"""Blocks of steps that every worker makes alone, after which all agree on the weights: `local` and `block_momentum`.

Caller: `job.py`, as a `Work`. A block is the unit that is committed. When somebody is lost in the middle of one, all
others go back to its start, weights and optimiser, and its samples are divided anew; so every sample of an epoch is in
exactly one committed block, and the weights after a block are the same bits on all workers.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from laconic.consistency.churn.replica import Replica
from laconic.consistency.modes.block_momentum import BlockMomentum
from laconic.consistency.modes.local import Local


class Blocks:
    """`period` steps of the worker's own, or fewer at the end of an epoch; then the mean of all weights, by samples.

    local: w ← w̄ = Σᵢ nᵢ·wᵢ / N, with nᵢ of the block's N samples at worker i. block_momentum, with m members and w_g
    the block's start: Δ ← μΔ + ζ(w̄ − w_g), w ← w_g + Δ, where μ follows m as members come and go unless it is given.
    With one member, w is its own.

    Cost: a copy of the weights and of the optimiser's state a block, to go back to; Δ for block_momentum.

    Args:
        mode: its period, what becomes of the optimiser's state after a block, and its momentum.
        relative: members offer how far their weights have moved, for a codec, not the weights themselves.
    """

    def __init__(self, replica: Replica, mode: Local | BlockMomentum, *, relative: bool) -> None:
        self._replica, self._mode, self._relative = replica, mode, relative
        self.period = mode.period
        self._start = torch.empty_like(replica.weights.values)
        self._saved: tuple[Any, Any] | None = None
        self._block: list[list[Tensor]] = []
        self._offered = torch.empty(0)
        self.samples = self.of_all = self.made = 0
        replica.extra["steps"] = 0
        if isinstance(mode, BlockMomentum):
            replica.extra["update"] = torch.zeros_like(self._start)

    @property
    def committed(self) -> Tensor:
        return self._start if self.made else self._replica.weights.values

    def share(self, parts: int, place: int) -> Tensor:
        if not self.made:
            self._begin(parts, place)
        return self._block[self.made][place]

    def _begin(self, parts: int, place: int) -> None:
        """Divide the next block's samples, and keep what is there to go back to."""
        replica = self._replica
        self._block = replica.ledger.block(parts, self._mode.period)
        self.samples = sum(len(shares[place]) for shares in self._block)
        self.of_all = sum(len(share) for shares in self._block for share in shares)
        self._place = place
        self._start.copy_(replica.weights.values)
        scheduler = None if replica.scheduler is None else replica.scheduler.state_dict()
        self._saved = copy.deepcopy((replica.optimizer.state_dict(), scheduler))

    def step(self) -> bool:
        if len(self._block[self.made][self._place]):
            self._replica.step()
        else:
            self._skip(1)
        self.made += 1
        return self.made == len(self._block)

    def _skip(self, steps: int) -> None:
        """Steps without samples, or made without this worker: the learning rate goes on as for all."""
        for _ in range(steps if self._replica.scheduler is not None else 0):
            self._replica.scheduler.step()

    def write(self, out: Tensor) -> None:
        values = self._replica.weights.values
        if self._relative:
            torch.sub(values, self._start, out=out)
        else:
            out.copy_(values)
        self._offered = out

    def apply(self, result: Tensor, parts: int, included: tuple[int, ...]) -> None:
        replica = self._replica
        values, steps = replica.weights.values, len(replica.ledger.block(parts, self._mode.period))
        if not self.made:
            self._start.copy_(values)  # made without this worker, which had not begun
        if parts > 1:
            self._move(result, parts)
            if self._mode.state == "forget":
                replica.optimizer.state.clear()
        else:
            if self._relative:
                values.add_(result - self._offered)  # what a codec still owed
            if "update" in replica.extra:
                torch.sub(values, self._start, out=replica.extra["update"])
        self._skip(steps - self.made)
        replica.ledger.commit(parts, included, self._mode.period)
        replica.extra["steps"] += steps
        self.made, self._saved = 0, None

    def _move(self, result: Tensor, parts: int) -> None:
        """From the block's start to what follows from all workers' blocks."""
        values = self._replica.weights.values
        if isinstance(self._mode, Local):
            if self._relative:
                torch.add(self._start, result, out=values)
            else:
                values.copy_(result)
            return
        momentum = 1 - 1 / parts if self._mode.momentum is None else self._mode.momentum
        moved = result if self._relative else result - self._start
        update = self._replica.extra["update"]
        update.mul_(momentum).add_(moved, alpha=self._mode.learning_rate)
        torch.add(self._start, update, out=values)

    def abandon(self) -> None:
        """Weights, optimiser and scheduler as they were at the block's start."""
        self._replica.forget_gradients()
        if self.made and self._saved is not None:
            optimizer, scheduler = self._saved
            self._replica.weights.values.copy_(self._start)
            self._replica.optimizer.load_state_dict(optimizer)
            if self._replica.scheduler is not None:
                self._replica.scheduler.load_state_dict(scheduler)
        self.made, self._saved = 0, None
