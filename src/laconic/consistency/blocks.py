"""Modes whose workers train alone for a block of steps, after which all agree on the weights.

A mode's `merge` computes the next weights from the mean of all weights, and knows no network. `Blocks` keeps its state
from block to block. The mean is taken by `BlockAgreement`, over the fixed ranks of a world, or by `elastic/replica.py`,
over members that come and go. So `local`, `block_momentum` and `diloco` are written once for both.

Over fixed ranks the weights may be cut into `fragments` with blocks of their own, each starting a share of the period
later than the one before. A fragment's mean may be awaited `delay` steps after it was sent, while training goes on
(`fragments.py`). delay < period/fragments, so that at most one fragment is under way.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from laconic.consistency.averaging import WEIGHT_OPTIONS, OwnWeights, average_buffers
from laconic.consistency.base import Mode, Setup, check_whole
from laconic.consistency.fragments import WHOLE, Fragment, UnderWay, fragments_of
from laconic.consistency.master_weights import FlatWeights
from laconic.errors import BadInput, UnknownName
from laconic.exchange.collectives import all_reduce
from laconic.specs import spec_of
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
        """How to treat the optimiser's state after a block: one of STATES."""
        return "keep"

    @property
    def fragments(self) -> int:
        """How many parts of about equal size the weights have; each is averaged every `period` steps, in turn."""
        return 1

    @property
    def delay(self) -> int:
        """Steps between sending a block's result and continuing from the mean."""
        return 0

    @property
    def mix(self) -> float:
        """The share of a worker's own weights in those that it continues from."""
        return 0.0

    @property
    def eager(self) -> bool:
        """Whether a worker replaces its own part of the mean by its newest weights."""
        return False

    @property
    def alone(self) -> bool:
        """Whether a single worker merges its blocks, too."""
        return False

    @property
    def lead(self) -> int | None:
        return None if self.period is None else self.period + self.delay

    def held(self, start: Tensor) -> dict[str, Tensor]:
        """What `merge` keeps from block to block, before the first: vectors by name."""
        return {}

    def merge(self, start: Tensor, mean: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        """Compute where the next block begins, after one from `start` that ended at `mean`; updates `held`."""
        return mean

    def model(self, start: Tensor, workers: int, held: dict[str, Tensor]) -> Tensor:
        """The trained weights, when the next block would begin at `start`."""
        return start

    def check_block(self) -> None:
        """Refuse an invalid period, fragments, delay or mix, or an unknown state rule."""
        if not isinstance(self.period, int) or isinstance(self.period, bool) or self.period < 1:
            raise BadInput(f"period is a number of steps above zero, got {self.period!r}")
        if self.state not in STATES:
            raise UnknownName("rule for the optimiser's state", self.state, STATES)
        check_whole(self.name, {"fragments": self.fragments}, 1)
        check_whole(self.name, {"delay": self.delay}, 0)
        if self.period < self.fragments:
            raise BadInput(f"{self.name}: {self.fragments} fragments take turns in a period, got period={self.period}")
        if self.delay and self.delay * self.fragments >= self.period:
            most = f"period / fragments = {self.period / self.fragments:g} steps"
            raise BadInput(f"{self.name}: delay is below {most}, so that one fragment is under way; got {self.delay}")
        if not 0 <= self.mix < 1:
            raise BadInput(f"{self.name}: mix, a worker's own share, is at least 0 and below 1, got {self.mix}")
        if self.eager and not self.delay:
            raise BadInput(f"{self.name}: eager makes up for a delay, and there is none: give delay=…, or eager=false")

    def spelled_out(self, sent_by: str) -> str:
        """This mode with all its options, and how its vectors travel, on one line."""
        return f"{spec_of(self, [field.name for field in fields(self)])} with {sent_by}"  # type: ignore[arg-type]

    def install(self, setup: Setup) -> BlockAgreement:
        return BlockAgreement(self, setup)


class Blocks:
    """One worker's blocks: the start of the present one, and the mode's state.

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

    def offer(self, out: Tensor | None = None, part: slice = WHOLE) -> Tensor:
        """Return this worker's vector for `part` after its steps, written to `out` if given."""
        values = self.values[part]
        out = torch.empty_like(values) if out is None else out
        return torch.sub(values, self.start[part], out=out) if self.relative else out.copy_(values)

    def merge(self, agreed: Tensor, workers: int, part: slice = WHOLE, offered: Tensor | None = None) -> None:
        """Begin the next block of `part` where the mean of all offers leads.

        With θ what the mode makes of the mean, w ← (1 − mix)·θ + mix·w. Eager: this worker's `offered` is replaced by
        what it would offer now in the mean that it goes on from itself; θ stays that of all.
        """
        start, values = self.start[part], self.values[part]
        held = {name: kept[part] for name, kept in self.held.items()}
        ahead: Tensor | None = None
        if offered is not None:
            fresher = agreed + (self.offer(part=part) - offered) / workers
            kept = {name: value.clone() for name, value in held.items()}
            ahead = self.mode.merge(start, self._mean(fresher, workers, part), workers, kept)
        start.copy_(self.mode.merge(start, self._mean(agreed, workers, part), workers, held))
        target = start if ahead is None else ahead
        if self.mode.mix:
            values.mul_(self.mode.mix).add_(target, alpha=1 - self.mode.mix)
        else:
            values.copy_(target)

    def _mean(self, agreed: Tensor, workers: int, part: slice) -> Tensor:
        """The mean weights, when the mean of all offers is `agreed`."""
        start, values = self.start[part], self.values[part]
        if not self.relative:
            return agreed
        if workers > 1:
            return start + agreed
        return values + (agreed - (values - start))  # its own, and what a codec had left out before

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
    """A BlockMode at work on the fixed ranks of a world.

    Attributes:
        moved: steps made since each fragment's block began.
    """

    def __init__(self, mode: BlockMode, setup: Setup) -> None:
        super().__init__(setup)
        self.mode = mode
        decay = setup.options.feedback_decay
        self.sent_by = f"codec {setup.codec}" + ("" if decay is None else f", feedback_decay={decay:g}")
        self.plain = self.alone and not mode.alone  # nothing but the optimiser
        self.fragments = fragments_of(self.weights.parameters, mode.fragments, mode.period)
        whole = mode.fragments == 1
        self.averagers = [self.make_averager(setup, None if whole else each.parameters) for each in self.fragments]
        if not whole and (matrix := self.averagers[0].state.buckets.choice.matrix_codec()):
            raise BadInput(f"fragments are flat vectors, and codec '{matrix}' is for matrices: leave fragments out")
        relative = not self.averagers[0].exact and not self.alone
        self.blocks = self.parts["blocks"] = Blocks(mode, self.weights.values, relative=relative)
        self.moved = [0 for _ in self.fragments]
        self.under_way = UnderWay(self.world.transport, self.fragments, keeps=mode.eager)
        self.resources.callback(self.under_way.close)
        if mode.delay:
            self.parts["under_way"] = self.under_way

    def after_step(self) -> None:
        self.blocks.made += 1
        self.moved = [moved + 1 for moved in self.moved]
        if not self.plain:
            if self.under_way.number != UnderWay.NONE:
                self.under_way.left -= 1
                if self.under_way.left <= 0:
                    self._land()
            for fragment in self.fragments:
                if fragment.is_due(self.blocks.made, self.mode.period):
                    self._send(fragment)
        if self.blocks.made == self.mode.period:
            self.blocks.made = 0
        self.settle()

    def _send(self, fragment: Fragment) -> None:
        """End a fragment's block: average it now, or in the background of the next steps."""
        averager, self.moved[fragment.number] = self.averagers[fragment.number], 0
        with self.agreeing(), self.weights.current():
            offer = self.blocks.offer(part=fragment.part)
            if not self.mode.delay:
                if not self.alone:
                    self.waited(averager.mean(offer))  # when it fails, the weights are as they were
                self._merge(fragment, offer)
                return
        self.under_way.start(fragment.number, offer, self.mode.delay)
        if not self.alone:
            self.under_way.send(averager.mean)

    def _land(self) -> None:
        """Continue from the mean that was under way; if it failed, the weights are unchanged."""
        under_way = self.under_way
        self.waited(seconds := under_way.wait())
        self._seconds += seconds
        with self.agreeing(), self.weights.current():
            offered = under_way.offered if self.mode.eager else None
            self._merge(self.fragments[under_way.number], under_way.mean, offered)
        if not self.mode.eager and not self.mode.mix:
            self.moved[under_way.number] = 0  # nothing is left of the steps made meanwhile
        under_way.forget()

    def _merge(self, fragment: Fragment, mean: Tensor, offered: Tensor | None = None) -> None:
        self.blocks.merge(mean, self.world.world_size, fragment.part, offered)
        consolidate_state(
            self.mode.state, self.optimizer, self.weights, None if self.alone else self.world, fragment.parameters
        )

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + self.under_way.sent_nbytes

    def finish(self) -> None:
        """Leave the trained model, with the exact mean of the blocks under way and of buffers."""
        if self.plain:
            return
        if self.under_way.number != UnderWay.NONE:
            self._land()
        with self.agreeing(), self.weights.current():
            if any(self.moved):
                offer = self.blocks.offer()
                if not self.alone:
                    self.exact_mean(offer)
                for fragment in self.fragments:
                    if self.moved[fragment.number]:
                        self.blocks.merge(offer[fragment.part], self.world.world_size, fragment.part)
            self.blocks.end(self.world.world_size)
            self.moved = [0 for _ in self.fragments]
            average_buffers(self.model, self.world)
        self.settle_finish()

    def explain(self) -> str:
        return f"{self.mode.spelled_out(self.sent_by)}\n\n{super().explain()}"

    def state_dict(self) -> dict[str, Any]:
        self.under_way.wait()  # before its residuals are saved
        return {**super().state_dict(), "moved": list(self.moved)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        check_like(state, {"moved": self.moved}, "the state of the fragments")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.under_way.wait()
        super().load_state_dict(state)
        self.moved = [int(moved) for moved in state["moved"]]


def consolidate_state(
    rule: str,
    optimizer: torch.optim.Optimizer,
    weights: FlatWeights,
    world: World | None = None,
    parameters: Sequence[Tensor] | None = None,
) -> None:
    """After weights were averaged: keep what the optimiser remembers, forget it, or average over `world` all tensors
    shaped like their parameter (momentum, Adam's moments), which all workers must have; of `parameters`, or of all."""
    parameters = weights.parameters if parameters is None else parameters
    if rule == "forget":
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    elif rule == "average" and world is not None:
        kept = [
            held
            for parameter in parameters
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
