"""What a worker does between two agreements: one step, or a block of steps that it makes alone.

Caller: `job.py`. What is agreed on is the unit that is committed. When somebody is lost before it is, all others go
back to the last agreement, and its samples are divided anew; so every sample of an epoch is in exactly one committed
step or block, and the weights after it are the same bits on all workers.
"""

from __future__ import annotations

import copy
from typing import Any, Protocol

from torch import Tensor

from laconic.consistency.blocks import BlockMode, Blocks, consolidate_state
from laconic.consistency.churn.replica import Replica


class Work(Protocol):
    """What lies between two agreements.

    Attributes:
        samples: this worker's, in what is agreed on next.
        of_all: all workers', in what is agreed on next.
        made: steps made here that are not agreed on yet: they are lost when somebody else is.
        period: the most steps from one agreement to the next.
    """

    period: int
    samples: int
    of_all: int

    @property
    def made(self) -> int: ...

    @property
    def committed(self) -> Tensor:
        """The weights after the last agreement."""

    def share(self, parts: int, place: int) -> Tensor:
        """The samples of this worker's next step, as one of `parts` members."""

    def step(self) -> bool:
        """Gradients are there: make what can be made alone; whether it is time to agree."""

    def write(self, out: Tensor) -> None:
        """Write what this worker offers."""

    def apply(self, result: Tensor, parts: int, included: tuple[int, ...]) -> None:
        """Go on with what was agreed on, in which the members at the places `included` have a part."""

    def abandon(self) -> None:
        """Go back to the last agreement."""


class Gradients:
    """One step, by what all workers' gradients give."""

    period = 1
    made = 0

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self.samples = self.of_all = 0

    @property
    def committed(self) -> Tensor:
        return self._replica.weights.values

    def share(self, parts: int, place: int) -> Tensor:
        shares = self._replica.ledger.shares(parts)
        self.samples, self.of_all = len(shares[place]), sum(map(len, shares))
        return shares[place]

    def step(self) -> bool:
        return True

    def write(self, out: Tensor) -> None:
        self._replica.weights.gradients(out)

    def apply(self, result: Tensor, parts: int, included: tuple[int, ...]) -> None:
        self._replica.weights.set_gradients(result)
        self._replica.step()
        self._replica.ledger.commit(parts, included)

    def abandon(self) -> None:
        self._replica.forget_gradients()


class BlockWork:
    """A block of `period` steps, or fewer at the end of an epoch; then what `mode.merge` makes of the mean weights.

    The mean counts each member by its samples: w̄ = Σᵢ nᵢ·wᵢ / N, with nᵢ of the block's N samples at member i.

    Cost: a copy of the weights and of the optimiser's state a block, to go back to.

    Args:
        relative: members offer how far their weights have moved, for a codec, not the weights themselves.
    """

    def __init__(self, replica: Replica, mode: BlockMode, *, relative: bool) -> None:
        assert mode.period is not None
        self._replica, self._mode, self.period = replica, mode, mode.period
        self._blocks = Blocks(mode, replica.weights.values, relative=relative)
        self._saved: tuple[Any, Any] | None = None
        self._shares: list[list[Tensor]] = []
        self.samples = self.of_all = self._place = 0
        replica.extra |= {"steps": 0, **self._blocks.held}

    @property
    def made(self) -> int:
        return self._blocks.made

    @property
    def committed(self) -> Tensor:
        return self._blocks.start if self.made else self._replica.weights.values

    def share(self, parts: int, place: int) -> Tensor:
        if not self.made:
            self._begin(parts, place)
        return self._shares[self.made][place]

    def _begin(self, parts: int, place: int) -> None:
        """Divide the next block's samples, and keep what is there to go back to."""
        replica = self._replica
        self._shares, self._place = replica.ledger.block(parts, self.period), place
        self.samples = sum(len(shares[place]) for shares in self._shares)
        self.of_all = sum(len(share) for shares in self._shares for share in shares)
        self._blocks.begin()
        scheduler = None if replica.scheduler is None else replica.scheduler.state_dict()
        self._saved = copy.deepcopy((replica.optimizer.state_dict(), scheduler))

    def step(self) -> bool:
        if len(self._shares[self.made][self._place]):
            self._replica.step()
        else:
            self._skip(1)
        self._blocks.made += 1
        return self.made == len(self._shares)

    def _skip(self, steps: int) -> None:
        """Steps without samples, or made without this worker: the learning rate goes on as for all."""
        for _ in range(steps if self._replica.scheduler is not None else 0):
            self._replica.scheduler.step()

    def write(self, out: Tensor) -> None:
        self._blocks.offer(out)

    def apply(self, result: Tensor, parts: int, included: tuple[int, ...]) -> None:
        replica, blocks, made = self._replica, self._blocks, self.made
        steps = len(replica.ledger.block(parts, self.period))
        if not made:
            blocks.begin()  # made without this worker, which had not begun
        blocks.held = {name: replica.extra[name] for name in blocks.held}  # a newcomer has its peer's
        blocks.merge(result, parts)
        if parts > 1:
            consolidate_state(self._mode.state, replica.optimizer, replica.weights)
        self._skip(steps - made)
        replica.ledger.commit(parts, included, self.period)
        replica.extra["steps"] += steps
        self._saved = None

    def abandon(self) -> None:
        """Weights, optimiser and scheduler as they were at the block's start."""
        replica = self._replica
        replica.forget_gradients()
        if self.made and self._saved is not None:
            optimizer, scheduler = self._saved
            self._blocks.abandon()
            replica.optimizer.load_state_dict(optimizer)
            if replica.scheduler is not None:
                replica.scheduler.load_state_dict(scheduler)
        self._blocks.made, self._saved = 0, None
