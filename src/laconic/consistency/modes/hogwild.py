"""Hogwild: all workers of one host write to the same weights, without locks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Mode, Setup, register
from laconic.consistency.shared_memory import SharedMemory
from laconic.consistency.weights import average_buffers
from laconic.exchange.collectives import barrier

LINE = 64  # bytes of a cache line: each worker counts in its own


@register("hogwild")
@dataclass(frozen=True)
class Hogwild(Mode):
    """Every worker's parameters are views of one shared memory, and its optimiser steps on them, whoever else does.

    w ← w − η∇f(w′), where w′ is what w was when this worker read it. Nothing is locked: two workers that add to the
    same value within the same few nanoseconds may lose one of the two additions. With sparse gradients
    (nn.Embedding(sparse=True) under SGD or SparseAdam) only the rows that were touched are written. The inner
    optimiser's state (momentum, moments) is each worker's own.

    m workers make m updates in the time of one, each of full size: it is as if one worker made m times as many steps.

    Cost: no bytes; one memory for all. Staleness is counted: the updates of others between this worker's last step,
    after which it read the weights, and its next. `finish` waits for all workers; `close` gives each model a copy of
    its own.

    Raises:
        BadInput: from install: workers on several hosts, a codec, an option, or parameters that are not float32.

    >>> str(Hogwild())
    'hogwild'

    Source: Niu et al., Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, NeurIPS 2011.
    Differs: an update is the optimiser's own vectorised one, not an atomic addition to each value.
    """

    summary: ClassVar[str] = "workers of one host write to the same weights without locks"
    source: ClassVar[str] = "Niu et al., Hogwild!, NeurIPS 2011"
    examples: ClassVar[tuple[str, ...]] = ("hogwild",)
    same_weights: ClassVar[bool] = False
    one_host: ClassVar[bool] = True

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def no_codec(self) -> str:
        return "it sends nothing"

    def install(self, setup: Setup) -> HogwildAgreement:
        return HogwildAgreement(setup)


class HogwildAgreement(OwnWeights):
    """Hogwild at work.

    Attributes:
        weights: the shared weights.
        updates: how many updates each worker has made, by rank; each counts its own only, so no count is lost.
    """

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        world = setup.world
        counts_nbytes = LINE * world.world_size
        self.memory = SharedMemory(world, counts_nbytes + self.weights.values.nbytes)
        self._counts = self.memory.bytes[:counts_nbytes].view(torch.int64).view(world.world_size, -1)[:, 0]
        shared = self.memory.bytes[counts_nbytes:].view(torch.float32)
        if world.rank == 0:
            shared.copy_(self.weights.values)
        barrier(group=world)  # nobody steps on weights that are not there yet
        self._lay(shared)
        self._read_at = 0

    @property
    def updates(self) -> list[int]:
        return [int(count) for count in self._counts]

    def _lay(self, values: Tensor) -> None:
        """Let the parameters be views of `values`."""
        self.weights.values = values
        for parameter, part in self.weights.parts():
            parameter.data = part

    def _others(self) -> int:
        """How many updates the others have made."""
        return int(self._counts.sum() - self._counts[self.world.rank])

    def before_step(self) -> None:
        with self.agreeing():
            self._stale = self._others() - self._read_at

    def after_step(self) -> None:
        self._counts[self.world.rank] += 1
        self._read_at = self._others()
        self.settle(self._stale)

    def finish(self) -> None:
        """Wait until all have made their last update; the mean of the buffers."""
        barrier(group=self.world)
        if not self.alone:
            average_buffers(self.model, self.world)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def close(self) -> None:
        """Undo `install`; the model keeps a copy of the weights, of its own."""
        if self._handles:
            self._lay(self.weights.values.clone())
            self._counts = self._counts.clone()
            self.memory.close()
        super().close()
