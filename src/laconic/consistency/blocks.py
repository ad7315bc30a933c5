"""Modes whose workers train alone for a block of steps, after which all agree on the weights.

A mode's `merge` computes the next weights from the mean of all weights, and knows no network. `Blocks` keeps its state
from block to block. The mean is taken by `BlockAgreement`, over the fixed ranks of a world, or by `elastic/replica.py`,
over members that come and go. So `local`, `block_momentum` and `diloco` are written once for both.

Over fixed ranks the weights may be cut into `fragments` with blocks of their own, each starting a share of the period
later than the one before. A fragment's mean may be awaited `delay` steps after it was sent, while training goes on
(`fragments.py`). delay < period/fragments, so that at most one fragment is under way. A worker is a rank, or a site of
several ranks that average their gradients at every step (`site_levels.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor

from laconic.consistency.averaging import WEIGHT_OPTIONS, OwnWeights
from laconic.consistency.base import Mode, Setup, check_whole
from laconic.consistency.fragments import WHOLE, Fragment, UnderWay, fragments_of
from laconic.consistency.master_weights import FlatWeights
from laconic.consistency.mode_plan import ModePlan
from laconic.consistency.outer import OuterFactory, OuterOptimizer
from laconic.consistency.site_levels import SiteGradients, SiteLevels, SiteShares
from laconic.errors import BadInput, UnknownName
from laconic.specs import spec_of
from laconic.storage.form import check_like
from laconic.transports.base import Transport

if TYPE_CHECKING:
    from laconic.consistency.period import AutoPeriod
    from laconic.exchange.reported_loss import ReportedLoss

STATES = ("keep", "average", "forget")


class BlockMode(Mode):
    """A mode that agrees on weights every `period` steps."""

    options = (*WEIGHT_OPTIONS, "quality")
    own_options: ClassVar[tuple[str, ...]] = ("sites", "site_codec", "masters", "period")
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
    def plannable(self) -> bool:
        return self.period is not None

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
            text = f"period is a number of steps above zero, got {self.period!r}"
            raise BadInput(f"{text}; for one that follows drift, give the first here and period='auto' to distribute")
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
        repeated: others, who have not made the block, get the same bits from its start and the mean of the offers.

    Attributes:
        held: what the mode keeps; members that come later need it too.
    """

    def __init__(self, mode: BlockMode, values: Tensor, *, relative: bool, repeated: bool = False) -> None:
        self.mode, self.values, self.relative, self._repeated = mode, values, relative, repeated
        self.start = values.clone()
        self.held = mode.held(self.start)
        self.outer: OuterOptimizer | None = None
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
        if self.outer is not None:
            self.outer.step(start - self._mean(agreed, workers, part), part.start or 0)
            return self._go_on(values, start)
        held = {name: kept[part] for name, kept in self.held.items()}
        ahead: Tensor | None = None
        if offered is not None:
            fresher = agreed + (self.offer(part=part) - offered) / workers
            kept = {name: value.clone() for name, value in held.items()}
            ahead = self.mode.merge(start, self._mean(fresher, workers, part), workers, kept)
        start.copy_(self.mode.merge(start, self._mean(agreed, workers, part), workers, held))
        self._go_on(values, start if ahead is None else ahead)

    def _go_on(self, values: Tensor, target: Tensor) -> None:
        """Let a worker continue from `target` and its own share of its weights."""
        if self.mode.mix:
            values.mul_(self.mode.mix).add_(target, alpha=1 - self.mode.mix)
        else:
            values.copy_(target)

    def _mean(self, agreed: Tensor, workers: int, part: slice) -> Tensor:
        """The mean weights, when the mean of all offers is `agreed`."""
        start, values = self.start[part], self.values[part]
        if not self.relative:
            return agreed
        if workers > 1 or self._repeated:
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
        if self.outer is not None:
            self.outer.forget()
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
    """A BlockMode at work on the fixed ranks of a world, of which each, or each site of several, has blocks of its own.

    Attributes:
        levels: who agrees with whom.
        planned: the modes by their first steps, of which `mode` is the one in force; None where it stays the same.
        auto_period: what chooses the period of `mode`; None where it is given.
        moved: steps made since each fragment's block began.
    """

    def __init__(self, mode: BlockMode, setup: Setup) -> None:
        if "sites" in setup.own and setup.options.hosts is not None:
            raise BadInput("sites= says which ranks are near to each other: leave hosts= out")
        quality = setup.options.quality
        if quality is not None and not quality.strip().startswith("noise"):
            raise BadInput(f"'{mode}' sends once in a while, and has one quality, 'noise': got '{quality}'")
        self.levels = levels = SiteLevels(setup.world, setup.own.get("sites"))
        super().__init__(setup)
        self.resources.callback(levels.close)
        self.mode = mode
        self.planned: ModePlan | None = setup.own.get("planned")
        self.site_gradients: SiteGradients | None = None
        self.site_codec = str(setup.own.get("site_codec", "none"))
        if levels.size > 1:
            near = self.site_gradients = SiteGradients(setup, levels, setup.own.get("site_codec", "none"))
            self.parts["site"] = near.state
            self.resources.callback(near.close)
        self._crossed_before_nbytes = levels.across.transport.counters.total_sent_nbytes
        decay = setup.options.feedback_decay
        self.sent_by = f"codec {setup.codec}" + ("" if decay is None else f", feedback_decay={decay:g}")
        self.apart = levels.count > 1  # blocks are made by several
        self.plain = not self.apart and not mode.alone  # nothing but the optimiser
        self.fragments = fragments_of(self.weights.parameters, mode.fragments, mode.period)
        self.shares = [SiteShares(levels, each.parameters) for each in self.fragments]
        far = replace(setup, world=levels.across)
        self.averagers = [self.make_averager(far, each.parameters) for each in self.shares]
        if mode.fragments > 1 and (matrix := self.averagers[0].state.buckets.choice.matrix_codec()):
            raise BadInput(f"fragments are flat vectors, and codec '{matrix}' is for matrices: leave fragments out")
        relative = not self.averagers[0].exact and self.apart
        self.blocks = self.parts["blocks"] = Blocks(mode, self.weights.values, relative=relative)
        if "outer" in setup.own:
            self._step_by(setup.own["outer"])
        self.auto_period: AutoPeriod | None = None
        if "period" in setup.own:
            assert mode.period is not None  # `distribute` has seen to it
            from laconic.consistency.period import AutoPeriod

            auto = AutoPeriod(mode.period, setup.own["period"], self.fragments, mode.delay)
            self.auto_period = self.parts["period"] = auto
        self.moved = [0 for _ in self.fragments]
        self.under_way = UnderWay(
            levels.across.transport, self.fragments, keeps=mode.eager, device=self.weights.values.device
        )
        self.resources.callback(self.under_way.close)
        if mode.delay:
            self.parts["under_way"] = self.under_way

    def _step_by(self, make: OuterFactory) -> None:
        """Let an optimiser of the user's take the outer steps."""
        if self.mode.eager:
            raise BadInput("eager=true goes with the mode's own outer steps: leave outer=… out, or give mix=…")
        self.blocks.held = {}
        self.blocks.outer = self.parts["outer"] = OuterOptimizer(make, self.blocks.start, self.weights.parameters)

    @property
    def outer(self) -> torch.optim.Optimizer | None:
        """The outer optimiser that was given, for schedulers of its learning rate; None where the mode has its own."""
        return None if self.blocks.outer is None else self.blocks.outer.optimizer

    def before_step(self) -> None:
        if self.site_gradients is not None:
            with self.agreeing():
                self.waited(self.site_gradients.mean())

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
            if self.planned is not None:
                self._go_by(self.planned.at(self.step + 1))
            if self.auto_period is not None:
                self._take_period(self.auto_period.review(self.step + 1, self.levels.count))
        self.settle()

    def _take_period(self, period: int) -> None:
        """Begin periods of so many steps."""
        if period != self.mode.period:
            self._go_by(replace(self.mode, period=period))  # type: ignore[type-var]

    def _go_by(self, mode: Mode) -> None:
        """Begin a period by `mode`, which differs from the last in its period and outer steps only."""
        assert isinstance(mode, BlockMode)  # as all of a plan are
        self.mode = self.blocks.mode = mode
        self.fragments = fragments_of(self.weights.parameters, mode.fragments, mode.period)

    def _send(self, fragment: Fragment) -> None:
        """End a fragment's block: average it now, or in the background of the next steps."""
        averager, shares, auto = self.averagers[fragment.number], self.shares[fragment.number], self.auto_period
        measured: list[float] = []

        def average(values: Tensor) -> float:
            waited_s = averager.mean(shares.own(values))
            if auto is not None:
                auto.agree(fragment.number, measured, self.levels.across)
            return waited_s

        self.moved[fragment.number] = 0
        with self.agreeing(), self.weights.current():
            offer = self.blocks.offer(part=fragment.part)
            if auto is not None and self.apart:
                measured = auto.measure(fragment.number, self.weights.values)
            if not self.mode.delay:
                if self.apart:  # when it fails, the weights are as they were
                    self.waited(average(offer))
                    shares.gather(offer)
                self._merge(fragment, offer)
                return
        self.under_way.start(fragment.number, offer, self.mode.delay)
        if self.apart:
            self.under_way.send(average)

    def _land(self) -> None:
        """Continue from the mean that was under way; if it failed, the weights are unchanged."""
        under_way = self.under_way
        self.waited(seconds := under_way.wait())
        self._seconds += seconds
        with self.agreeing(), self.weights.current():
            if self.apart:
                self.shares[under_way.number].gather(under_way.mean)
            offered = under_way.offered if self.mode.eager else None
            self._merge(self.fragments[under_way.number], under_way.mean, offered)
        if not self.mode.eager and not self.mode.mix:
            self.moved[under_way.number] = 0  # nothing is left of the steps made meanwhile
        under_way.forget()

    def _merge(self, fragment: Fragment, mean: Tensor, offered: Tensor | None = None) -> None:
        self.blocks.merge(mean, self.levels.count, fragment.part, offered)
        average = self.levels.mean if self.apart else None
        consolidate_state(self.mode.state, self.optimizer, self.weights, average, fragment.parameters)
        if self.auto_period is not None and self.apart:
            self.auto_period.settle(fragment.number, self.levels.count, self.weights.values)

    @property
    def transports(self) -> Sequence[Transport]:
        return [*super().transports, *self.levels.transports]

    @property
    def crossed_nbytes(self) -> int:
        """Payload bytes that this rank has sent to its counterparts in other sites."""
        counted = self.levels.across.transport.counters.total_sent_nbytes - self._crossed_before_nbytes
        return counted + self._exact_nbytes + sum(averager.native_nbytes for averager in self._averagers)

    def sent_nbytes(self) -> int:
        inside = 0 if self.site_gradients is None else self.site_gradients.native_nbytes
        return super().sent_nbytes() + inside + self.under_way.sent_nbytes

    def finish(self) -> None:
        """Bring all workers to the exact mean of the blocks under way and of buffers."""
        if self.alone and self.plain:
            return
        if self.under_way.number != UnderWay.NONE:
            self._land()
        with self.agreeing(), self.weights.current():
            if any(self.moved) and not self.plain:
                offer = self.blocks.offer()
                if self.apart:
                    shares = SiteShares(self.levels, self.weights.parameters)
                    self.exact_mean(shares.own(offer), self.levels.across, shares.parameters)
                    shares.gather(offer)
                for fragment in self.fragments:
                    if self.moved[fragment.number]:
                        self.blocks.merge(offer[fragment.part], self.levels.count, fragment.part)
            if not self.plain:
                self.blocks.end(self.levels.count)
            self.moved = [0 for _ in self.fragments]
            if self.auto_period is not None:
                self.auto_period.restart()
            self.levels.average_buffers(self.model)
        self.settle_finish()

    def explain(self) -> str:
        levels = f"\n{self._levels_in_words()}" if self.levels.size > 1 else ""
        plan = "" if self.planned is None else f"\nplanned: {self.planned}"
        outer = "" if self.outer is None else f"\nouter steps are those of {type(self.outer).__name__}, as given"
        auto = "" if self.auto_period is None else f"\n{self.auto_period.explain()}"
        head = f"{self.mode.spelled_out(self.sent_by)}{plan}{auto}{outer}{levels}"
        chosen = [averager.state.buckets.choice.table() for averager in self.averagers]
        return "\n\n".join(part for part in (head, *chosen, super().explain()) if part)

    def metrics(self) -> dict[str, float | str]:
        noise = [averager.state.buckets.noise for averager in self.averagers]
        chosen = noise[0].metrics() if len(noise) == 1 and noise[0] is not None else {}
        period = {} if self.auto_period is None else self.auto_period.metrics()
        return {**super().metrics(), **chosen, **period}

    def report_loss(self, loss: float) -> None:
        self.under_way.wait()  # so that its review is over, and the next one takes it on all ranks
        super().report_loss(loss)

    def _reported_losses(self) -> list[ReportedLoss]:
        noise = [averager.state.buckets.noise for averager in self.averagers]
        period = [] if self.auto_period is None else [self.auto_period.loss]
        return [*(each.loss for each in noise if each is not None), *period]

    def _levels_in_words(self) -> str:
        """Who exchanges what with whom, and what has crossed between sites."""
        levels = self.levels
        near = f"site {levels.numbers[self.world.rank]} of {levels.count} has ranks {_listed(levels.ranks)}"
        every = f"{near}, which average gradients at every step with codec {self.site_codec}"
        if not self.apart:
            return f"{every}; there is no other site"
        own, numel = sum(shares.numel for shares in self.shares), self.weights.values.numel()
        others = [rank for rank in levels.counterparts if rank != self.world.rank]
        period = "at the end" if self.mode.period is None else f"every {self.mode.period} steps"
        far = f"{period} this rank exchanges its share, {own:,} of {numel:,} values, with ranks {_listed(others)}"
        return f"{every}\n{far} of other sites; it has sent them {self.crossed_nbytes:,} B so far"

    def state_dict(self) -> dict[str, Any]:
        self.under_way.wait()  # before its residuals are saved
        sites = {"sites": list(self.levels.numbers)} if self.levels.size > 1 else {}
        planned = {} if self.planned is None else {"mode": str(self.mode)}
        return {**super().state_dict(), "moved": list(self.moved), **sites, **planned}

    def check_state(self, state: Mapping[str, Any]) -> None:
        sites = state.get("sites", list(range(self.world.world_size))) if isinstance(state, Mapping) else None
        if sites is not None and sites != list(self.levels.numbers):
            raise BadInput(f"the state is of a job with sites {sites}, this one's are {list(self.levels.numbers)}")
        super().check_state(state)
        check_like(state, {"moved": self.moved}, "the state of the fragments")
        if self.planned is not None and self.planned.named(state.get("mode")) is None:
            raise BadInput(f"the state is of a job by '{state.get('mode')}', and none of {self.planned} is that")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.under_way.wait()
        super().load_state_dict(state)
        self.moved = [int(moved) for moved in state["moved"]]
        if self.planned is not None and (mode := self.planned.named(state["mode"])) is not None:
            self._go_by(mode)
        if self.auto_period is not None:
            self._take_period(self.auto_period.period)


def _listed(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks))


def consolidate_state(
    rule: str,
    optimizer: torch.optim.Optimizer,
    weights: FlatWeights,
    average: Callable[[Tensor], Tensor] | None = None,
    parameters: Sequence[Tensor] | None = None,
) -> None:
    """After weights were averaged: keep what the optimiser remembers, forget it, or `average` over all workers all
    tensors shaped like their parameter (momentum, Adam's moments), which all must have; of `parameters`, or of all."""
    parameters = weights.parameters if parameters is None else parameters
    if rule == "forget":
        for parameter in parameters:
            optimizer.state.pop(parameter, None)
    elif rule == "average" and average is not None:
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
                mean = average(flat)
                for held, part in zip(here, torch.split(mean, [held.numel() for held in here]), strict=True):
                    held.copy_(part.view_as(held))
