"""Modes whose workers train alone for a block of steps, after which all agree on the weights.

A mode says in `merge` what follows from the mean of all weights, and knows no network. `Blocks` keeps what it needs
from block to block. Who takes the mean is one of two: `BlockAgreement` here, over the fixed ranks of a world, and
`elastic/replica.py`, over members that come and go. So `local` and `block_momentum` are written once for both.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.consistency.averaging import WEIGHT_OPTIONS, OwnWeights, average_buffers
from laconic.consistency.base import Mode, Setup
from laconic.consistency.master_weights import FlatWeights
from laconic.errors import BadInput, UnknownName
from laconic.exchange.collectives import all_reduce
from laconic.storage.form import check_like
from laconic.transports.world import World

STATES = ("keep", "average", "forget")


class BlockMode(Mode):
    """A mode that agrees on weights every `period` steps."""

    options = WEIGHT_OPTIONS
    same_weights = False

    @property
    def period(self) -> int | None:
        """Steps a block; None: one block, which `finish` ends."""
        return None

    @property
    def state(self) -> str:
        """What becomes of the optimiser's state after a block: one of STATES."""
        return "keep"

    @property
    def lead(self) -> int | None:
        return self.period

    def held(self, start: Tensor) -> dict[str, Tensor]:
        """What `merge` keeps from block to block, before the first: vectors by name."""
        return {}

    def merge(self, start: Tensor, mean: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        """Where the next block begins, when one that began at `start` ended at `mean`; brings `held` up to date."""
        return mean

    def model(self, start: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        """The trained weights, when the next block would begin at `start`."""
        return start

    def check_block(self) -> None:
        """Refuse a period that is not a whole number above zero, or a rule for the state that there is not."""
        if not isinstance(self.period, int) or isinstance(self.period, bool) or self.period < 1:
            raise BadInput(f"period is a number of steps above zero, got {self.period!r}")
        if self.state not in STATES:
            raise UnknownName("rule for the optimiser's state", self.state, STATES)

    def install(self, setup: Setup) -> BlockAgreement:
        return BlockAgreement(self, setup)


class Blocks:
    """One worker's blocks: where the present one began, and what the mode keeps.

    Args:
        relative: workers offer how far their weights have moved, for a codec, not the weights themselves.

    Attributes:
        held: what the mode keeps; members that come later need it too.
    """

    def __init__(self, mode: BlockMode, values: Tensor, *, relative: bool) -> None:
        self.mode, self.values, self.relative = mode, values, relative
        self.start = values.clone()
        self.held = mode.held(self.start)
        self.made = 0  # steps made in this block

    def offer(self, out: Tensor | None = None) -> Tensor:
        """What this worker offers after its steps, written to `out` when given."""
        out = torch.empty_like(self.values) if out is None else out
        return torch.sub(self.values, self.start, out=out) if self.relative else out.copy_(self.values)

    def merge(self, agreed: Tensor, workers: int) -> None:
        """Begin the next block where the mean of all offers leads."""
        if not self.relative:
            mean = agreed
        elif workers > 1:
            mean = self.start + agreed
        else:
            mean = self.values + (agreed - (self.values - self.start))  # its own, and what a codec had left out before
        self.values.copy_(self.mode.merge(self.start, mean, workers, self.held))
        self.begin()

    def begin(self) -> None:
        """Begin a block at the present weights."""
        self.start.copy_(self.values)
        self.made = 0

    def abandon(self) -> None:
        """Go back to where this block began."""
        self.values.copy_(self.start)
        self.made = 0

    def end(self, workers: int) -> None:
        """Leave the trained weights, with nothing kept from earlier blocks."""
        self.values.copy_(self.mode.model(self.start, workers, self.held))
        for kept in self.held.values():
            kept.zero_()
        self.begin()

    def state_dict(self) -> dict[str, Any]:
        held = {name: value.clone() for name, value in self.held.items()}
        return {"start": self.start.clone(), "held": held, "made": self.made}

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_like(state, {"start": self.start, "held": self.held, "made": 0}, "the state of the blocks")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.start.copy_(state["start"])
        self.made = int(state["made"])
        for name, value in self.held.items():
            value.copy_(state["held"][name])


class BlockAgreement(OwnWeights):
    """A BlockMode at work on the fixed ranks of a world."""

    def __init__(self, mode: BlockMode, setup: Setup) -> None:
        super().__init__(setup)
        self.mode, self.averager = mode, self.make_averager(setup)
        self.blocks = self.parts["blocks"] = Blocks(mode, self.weights.values, relative=not self.averager.exact)

    def after_step(self) -> None:
        blocks = self.blocks
        blocks.made += 1
        if not self.alone and blocks.made == self.mode.period:
            with self.agreeing(), self.weights.current():
                offer = blocks.offer()
                self.waited(self.averager.mean(offer))  # when it fails, the weights are as they were
                blocks.merge(offer, self.world.world_size)
                consolidate_state(self.mode.state, self.optimizer, self.weights, self.world)
        self.settle()

    def finish(self) -> None:
        """Leave the model that all blocks have trained, with the exact mean of the one under way, and of buffers."""
        if self.alone:
            return
        with self.agreeing(), self.weights.current():
            if self.blocks.made:
                self.blocks.merge(self.exact_mean(self.blocks.offer()), self.world.world_size)
            self.blocks.end(self.world.world_size)
            average_buffers(self.model, self.world)
        self.settle_finish()


def consolidate_state(
    rule: str, optimizer: torch.optim.Optimizer, weights: FlatWeights, world: World | None = None
) -> None:
    """After weights were averaged: keep what the optimiser remembers, forget it, or average over `world` all tensors
    shaped like their parameter (momentum, Adam's moments), which all workers must have."""
    if rule == "forget":
        for parameter in weights.parameters:
            optimizer.state.pop(parameter, None)
    elif rule == "average":
        kept = [
            held
            for parameter in weights.parameters
            for _, held in sorted(optimizer.state.get(parameter, {}).items())
            if isinstance(held, Tensor) and held.shape == parameter.shape and held.is_floating_point()
        ]
        if kept:
            with weights.copies.on_host(kept) as here:
                flat = torch.cat([held.reshape(-1) for held in here])
                flat = flat.float() if flat.itemsize < 4 else flat
                mean = all_reduce(flat, "mean", algorithm="ring", group=world)
                for held, part in zip(here, torch.split(mean, [held.numel() for held in here]), strict=True):
                    held.copy_(part.view_as(held))
