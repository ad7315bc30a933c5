"""`async`, `hogwild` and `gossip` over MPI windows: a worker reads and adds to the weights without a server.

Callers: these modes with `rma=true`. The inner optimiser steps on the worker, and what it changed is added: no thread
runs beside the training. A window cannot hold a codec's payload, so values travel as float32.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.consistency.averaging import OwnWeights, average_buffers
from laconic.consistency.base import Setup
from laconic.consistency.servers.shards import cut
from laconic.exchange.collectives import barrier
from laconic.storage.form import check_like
from laconic.transports.mpi_window import Part, Window

NO_CODEC = "MPI adds float32 in a window"


class WindowAgreement(OwnWeights):
    """Weights in windows: the base of both kinds.

    Attributes:
        window: None with one worker, which steps by itself.
    """

    def __init__(self, setup: Setup, mode: str, held: slice) -> None:
        super().__init__(setup)
        self.held = held  # the part of the flat weights that this rank's window has
        self.window: Window | None = None
        self._origin = self.weights.values  # where this step began
        self._fresh = False  # nobody may read before all have loaded
        if not self.alone:
            self.window = Window(setup.world, self.weights.values[held], mode)
            self.resources.callback(self.window.close)
            barrier(group=setup.world)

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + (0 if self.window is None else self.window.moved_nbytes)

    def before_step(self) -> None:
        if self.window is not None:
            if self._fresh:
                self._fresh = False
                barrier(group=self.world)
            with self.weights.current() as values:
                self._origin = values.clone()

    def after_step(self) -> None:
        staleness = 0
        if self.window is not None:
            with self.agreeing(), self.weights.current() as values:
                staleness = self.exchange(self.window, values - self._origin)
        self.settle(staleness)

    def exchange(self, window: Window, moved: Tensor) -> int:
        """Add this step's movement to the window, and read the others'; returns the staleness."""
        raise NotImplementedError

    def finish(self) -> None:
        """Wait for all, and leave the same weights and the mean of the buffers on all."""
        if self.window is not None:
            with self.agreeing(), self.weights.current():
                begun = time.perf_counter()
                self.conclude(self.window)
                self.waited(time.perf_counter() - begun)
                average_buffers(self.model, self.world)
                barrier(group=self.world)  # nobody goes on before all have read
            self.settle_finish()

    def conclude(self, window: Window) -> None:
        """Leave the result in the model."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.window is None:
            return state
        own = torch.empty_like(self.weights.values[self.held])
        self.window.read([(self.world.rank, 0, own)])
        return {**state, "window": own}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        if self.window is not None:
            check_like(state, {"window": self.weights.values[self.held]}, "the state of a window")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.window is not None:
            self.window.write_own(state["window"])
            self._fresh = True


class SharedWeights(WindowAgreement):
    """One set of weights, sharded over all ranks: `async(rma=true)` and `hogwild(rma=true)`.

    w ← w + Δ/(1 + τ), where Δ is what the inner optimiser did in `push` steps, and τ counts the updates that the shard
    has had since this worker read it (not `staleness_aware`: w ← w + Δ). For SGD without momentum servers do the same.
    """

    def __init__(self, setup: Setup, mode: str, push: int = 1, pull: int = 1, *, staleness_aware: bool) -> None:
        numel = sum(p.numel() for group in setup.optimizer.param_groups for p in group["params"])
        self.edges = cut(numel, setup.world.world_size)
        rank = setup.world.rank
        super().__init__(setup, mode, slice(*self.edges[rank]) if rank < len(self.edges) else slice(0, 0))
        self.push, self.pull, self.staleness_aware = push, pull, staleness_aware
        self.accrued = torch.zeros_like(self.weights.values)
        self._versions = [0] * len(self.edges)

    def exchange(self, window: Window, moved: Tensor) -> int:
        self.accrued += moved
        staleness = self._push(window) if (self.step + 1) % self.push == 0 else 0
        if (self.step + 1) % self.pull == 0:
            self._versions = window.count(range(len(self.edges)), 0)
            self._read(window)
        return staleness

    def _parts(self, values: Tensor) -> list[Part]:
        return [(rank, 0, values[begin:end]) for rank, (begin, end) in enumerate(self.edges)]

    def _push(self, window: Window) -> int:
        before = window.count(range(len(self.edges)), 1)
        late = [max(0, now - seen) for now, seen in zip(before, self._versions, strict=True)]
        parts = self._parts(self.accrued)
        if self.staleness_aware:
            for (_, _, part), count in zip(parts, late, strict=True):
                part /= 1 + count
        window.add(parts)
        self.accrued.zero_()
        return max(late)

    def _read(self, window: Window) -> None:
        window.read(self._parts(self.weights.values))

    def conclude(self, window: Window) -> None:
        if bool(self.accrued.any()):
            self._push(window)
        self._read(window)  # comes after what this rank added, so that all of that is there
        barrier(group=self.world)
        self._read(window)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "accrued": self.accrued.clone()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        check_like(state, {"accrued": self.accrued}, "the state of a window")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.accrued.copy_(state["accrued"])


class WindowPairs(WindowAgreement):
    """Asynchronous gossip: a worker's weights lie in its own window, and another moves both to their midpoint.

    After a step, xᵢ ← xᵢ + ½(xⱼ − xᵢ) and xⱼ ← xⱼ − ½(xⱼ − xᵢ), by two additions of one difference: the sum over all
    workers never changes, whoever else adds meanwhile.
    """

    def __init__(self, setup: Setup, friends: list[int], gamma: float, seed: int) -> None:
        super().__init__(setup, "gossip", slice(None))
        self.friends, self._pull = friends, 0.5 * gamma
        self._draw = np.random.Generator(np.random.Philox(key=[seed, setup.world.rank]))
        self._met = 0

    def exchange(self, window: Window, moved: Tensor) -> int:
        rank, values = self.world.rank, self.weights.values
        friend = self.friends[int(self._draw.integers(len(self.friends)))]
        theirs = torch.empty_like(values)
        window.add([(rank, 0, moved)])
        window.read([(rank, 0, values), (friend, 0, theirs)])
        difference = (theirs - values).mul_(self._pull)
        window.add([(rank, 0, difference), (friend, 0, -difference)])
        window.count([friend], 1)
        window.read([(rank, 0, values)])
        before, self._met = self._met, window.count([rank], 0)[0]
        return self._met - before

    def conclude(self, window: Window) -> None:
        everyone = [(rank, 0, torch.empty_like(self.weights.values)) for rank in range(self.world.world_size)]
        window.read(everyone)  # comes after what this rank added, so that all of that is there
        barrier(group=self.world)
        window.read(everyone)
        barrier(group=self.world)
        total = torch.zeros_like(self.weights.values)
        for _, _, each in everyone:
            total += each
        self.weights.values.copy_(total / len(everyone))
        window.write_own(self.weights.values)
