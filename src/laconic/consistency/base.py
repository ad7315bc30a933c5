"""What a consistency mode is, how it is named, and what all modes share.

Callers: `distribute`. A mode is a frozen dataclass, the spec (`"stale(4)"`, `"local(period=8)"`). `install` returns an
Agreement, the job, which lives as long as the training and holds all state.

To add a mode, add one file with one `@register` class to `modes/`; the conformance suite picks it up.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, ClassVar, Protocol

import torch
from torch import nn

from laconic import specs
from laconic.codecs.plans import CodecPlan
from laconic.consistency.hooks import StepHooks
from laconic.errors import BadInput, TransportError
from laconic.exchange.job import Job, StepRecord, beside_ddp, wire_nbytes
from laconic.exchange.options import Options
from laconic.exchange.ownership import check_owner, owned
from laconic.registry import Registry
from laconic.storage.form import check_like
from laconic.transports.base import Transport
from laconic.transports.world import World

REGISTRY: Registry[type[Mode]] = Registry("consistency", "laconic.consistency.modes")
register = REGISTRY.register
names = REGISTRY.names
get = REGISTRY.get
MASTERS = ("host", "device")  # where float32 weights may lie beside the model's own
INSTALLED = "_laconic_agreement"  # the optimiser's attribute that is its job, as long as it is distributed
EXCHANGE_OPTIONS = (
    "quality", "algorithm", "exempt", "feedback", "feedback_decay", "momentum", "hosts", "message_nbytes",
)  # fmt: skip


@dataclass(frozen=True)
class Setup:
    """What a mode is installed on: a model, its optimiser, and how they communicate.

    Attributes:
        codec: "none" for modes that take no codec.
        options: of the exchange; `distribute` has checked that the mode has those that are given.
        own: options that only this mode has, by name.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    world: World
    codec: CodecPlan = "none"
    options: Options = field(default_factory=Options)
    own: Mapping[str, Any] = field(default_factory=dict)


class Mode(ABC):
    """When workers agree. Every subclass that can be built is a frozen dataclass of plain values."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""  # one line for lists
    source: ClassVar[str] = ""  # the paper
    examples: ClassVar[tuple[str, ...]] = ()  # the specs that the conformance suite trains with
    options: ClassVar[tuple[str, ...]] = ()  # which `Options` of the exchange it has
    codec: ClassVar[str] = ""  # of a preset: what it sends through where none is given
    feedback_decay: ClassVar[float | None] = None  # of a preset: likewise
    own_options: ClassVar[tuple[str, ...]] = ()  # which further ones of `distribute`
    same_weights: ClassVar[bool] = True  # all workers hold the same bits after every step (without: after `finish`)
    one_host: ClassVar[bool] = False  # shared memory: all workers on one machine

    @abstractmethod
    def install(self, setup: Setup) -> Agreement:
        """Make `optimizer.step()` train together with the other workers of the world."""

    @property
    def lockstep(self) -> bool:
        """Whether all workers take the same number of steps; if not, each takes as many as it can."""
        return True

    @property
    def repeatable(self) -> bool:
        """Whether a repeated training gives the same bits, however long each worker takes for its steps."""
        return self.lockstep

    @property
    def lead(self) -> int | None:
        """The most steps that a worker can be ahead of rank 0; None: unlimited."""
        return None

    @property
    def plannable(self) -> bool:
        """Whether its period and outer steps may follow a plan (`mode_plan.py`)."""
        return False

    @property
    def shares_buffers(self) -> bool:
        """Whether a DDP model still broadcasts rank 0's buffers before each forward, a collective of all ranks."""
        return False

    def outlives(self, rank: int, world_size: int) -> bool:
        """Whether the others go on to one model if this rank is lost; if not, each raises an error that names it."""
        return False

    @property
    def no_codec(self) -> str:
        """Why this mode takes no codec; empty where it takes one."""
        return ""

    def __str__(self) -> str:
        return specs.spec_of(self)


def build(spec: str) -> Mode:
    """The mode that a spec names: "local(period=8)"."""
    return specs.build(REGISTRY, spec)


class Stateful(Protocol):
    """What can be saved and loaded."""

    def state_dict(self) -> dict[str, Any]: ...

    def check_state(self, state: Mapping[str, Any], /) -> None:
        """Refuse, with BadInput, a state that cannot be loaded whole."""

    def load_state_dict(self, state: Mapping[str, Any], /) -> object: ...


class Agreement(Job):
    """A mode installed on one optimiser, and the job that `distribute` returns.

    Subclasses: they call this constructor and override `before_step` (gradients are there), `after_step` (the inner
    optimiser has stepped) and `finish` as they need. There are hooks around `step()` (`hooks.py`), counters, and state
    in the optimiser's state_dict: `parts` are objects with a state of their own, by the name under which it is saved.
    Each step ends in one `settle`. What a subclass adds to `state_dict` it checks in `check_state`, which comes before
    anything is loaded. `close` closes `resources`, the last first.

    Attributes:
        alone: there is one worker only, and nothing is ever exchanged.
        step: steps taken so far.
        records: one StepRecord per step, the last 10,000.
    """

    KEPT: ClassVar[int] = 10_000

    def __init__(self, setup: Setup) -> None:
        self.model, self.optimizer, self.world = setup.model, setup.optimizer, setup.world
        self.alone = setup.world.world_size == 1
        self.step = 0
        self.records: deque[StepRecord] = deque(maxlen=self.KEPT)
        self.parts: dict[str, Stateful] = {}
        self.resources = ExitStack()
        self._seconds = self._wait_s = 0.0
        self._collective_nbytes = self._settled_nbytes = 0

    def attach(self, mode: Mode) -> None:
        """Take part in the optimiser's steps from now on, until `close`."""
        self.own_weights = not mode.same_weights
        self.hooks = StepHooks(self, lockstep=mode.lockstep)
        setattr(self.optimizer, INSTALLED, self)  # keeps the job as long as the optimiser
        self.resources.callback(vars(self.optimizer).pop, INSTALLED, None)

    def before_step(self) -> None:
        """Run before the inner optimiser's own step."""

    def after_step(self) -> None:
        """Run after the inner optimiser's own step."""

    def evaluated(self) -> None:
        """Run after each evaluation of a closure: average the gradients, then the loss."""
        self.before_step()

    @property
    def closures(self) -> bool:
        """Whether `step(closure)` makes sense: workers agree in `evaluated`."""
        return False

    def explain(self) -> str:
        if not self.records:
            return super().explain()
        trained = sum(p.numel() for group in self.optimizer.param_groups for p in group["params"])
        sent_nbytes = int(statistics.median(record.sent_nbytes for record in list(self.records)[-100:]))
        return f"{beside_ddp(sent_nbytes, wire_nbytes(trained, self.world.world_size))}\n\n{super().explain()}"

    def predictor(self) -> nn.Module:
        """The module to predict with after `finish`: the model, or an ensemble of several."""
        return self.model

    def state_dict(self) -> dict[str, Any]:
        state = {"step": self.step, **{name: part.state_dict() for name, part in self.parts.items()}}
        return owned(state, self.world.rank, self.world.world_size, whole=False)

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse, with BadInput, a state that cannot be loaded whole."""
        check_owner(state, self.world)
        check_like(state, {"step": 0, **dict.fromkeys(self.parts)}, f"the state of {type(self).__name__}")
        for name, part in self.parts.items():
            part.check_state(state[name])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self.step = int(state["step"])
        for name, part in self.parts.items():
            part.load_state_dict(state[name])
        self.hooks.loaded()

    def close(self) -> None:
        self.resources.close()

    # what a step costs

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Charge the block's time and bytes to this step; other ranks are told of an error that names a peer."""
        begun, before = time.perf_counter(), self._on_the_wire_nbytes()
        try:
            yield
        except TransportError as error:
            self.world.note_cause(error)
            raise
        self._collective_nbytes += self._on_the_wire_nbytes() - before
        self._seconds += time.perf_counter() - begun

    @property
    def transports(self) -> Sequence[Transport]:
        """Those on which workers agree."""
        return [self.world.transport]

    def _on_the_wire_nbytes(self) -> int:
        return sum(transport.counters.total_sent_nbytes for transport in self.transports)

    def sent_nbytes(self) -> int:
        """Bytes that this worker has sent for this mode so far; modes with sending threads add theirs."""
        return self._collective_nbytes

    def waited(self, seconds: float) -> None:
        """Count so many of this step's seconds as waiting for others."""
        self._wait_s += seconds

    def settle(self, staleness: int | None = None) -> None:
        """Keep the record of this step and begin that of the next."""
        self.records.append(StepRecord(self.step, *self._charged(), staleness))

    def settle_finish(self) -> None:
        """Add what `finish` cost to the last step's record."""
        seconds, wait_s, sent_nbytes = self._charged()
        if self.records:
            last = self.records[-1]
            self.records[-1] = dataclasses.replace(
                last, seconds=last.seconds + seconds, wait_s=last.wait_s + wait_s,
                sent_nbytes=last.sent_nbytes + sent_nbytes,
            )  # fmt: skip

    def _charged(self) -> tuple[float, float, int]:
        """Seconds, seconds of waiting and bytes since the last call."""
        seconds, wait_s, before = self._seconds, self._wait_s, self._settled_nbytes
        self._seconds, self._wait_s, self._settled_nbytes = 0.0, 0.0, self.sent_nbytes()
        return seconds, wait_s, self._settled_nbytes - before


def check_whole(mode: str, values: Mapping[str, object], least: int, what: str = "a whole number") -> None:
    """Refuse arguments of a mode that are not whole numbers from `least`.

    >>> check_whole("gaia", {"lag": -1}, 0)
    Traceback (most recent call last):
    ...
    laconic.errors.BadInput: gaia: lag is a whole number from 0, got -1
    """
    for name, value in values.items():
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise BadInput(f"{mode}: {name} is {what} from {least}, got {value!r}")
