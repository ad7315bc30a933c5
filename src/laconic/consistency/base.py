"""What a consistency mode is, how it is named, and what all modes share.

Callers: `distribute`. A mode is a frozen dataclass, the spec (`"stale(4)"`, `"local(period=8)"`); `install` makes of it
an Agreement, which lives as long as the training and holds all state.

To add a mode, add one file with one `@register` class to this folder; the conformance suite picks it up.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic import specs
from laconic.errors import BadInput
from laconic.exchange.collectives import broadcast
from laconic.exchange.policy import CodecPlan
from laconic.registry import Registry
from laconic.transports.world import World

REGISTRY: Registry[type[Mode]] = Registry("consistency")
register = REGISTRY.register
names = REGISTRY.names
get = REGISTRY.get
KEY = "laconic"  # where an optimiser's state_dict holds the agreement's
INSTALLED = "_laconic_agreement"  # the optimiser's attribute that is its agreement, as long as it is distributed


class Mode(ABC):
    """When workers agree. Every subclass that can be built is a frozen dataclass of plain values."""

    name: ClassVar[str] = ""
    summary: ClassVar[str] = ""  # one line for lists
    source: ClassVar[str] = ""  # the paper
    examples: ClassVar[tuple[str, ...]] = ()  # the specs that the conformance suite trains with
    same_weights: ClassVar[bool] = True  # all workers hold the same bits after every step (without: after `finish`)
    one_host: ClassVar[bool] = False  # shared memory: all workers on one machine
    lockstep: ClassVar[bool] = True  # all workers take the same number of steps; without, each as many as it can

    @abstractmethod
    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> Agreement:
        """Make `optimizer.step()` train together with the other workers of `world`.

        Raises:
            BadInput: a codec or option that this mode cannot use.
        """

    def __str__(self) -> str:
        return specs.spec_of(self)


def build(spec: str) -> Mode:
    """The mode that a spec names: "local(period=8)"."""
    return specs.build(REGISTRY, spec)


@dataclass(frozen=True)
class StepRecord:
    """What one `step()` cost and met on this worker.

    Attributes:
        step: from 0.
        seconds: spent in agreeing, of the whole step().
        wait_s: of these, waiting for others.
        sent_nbytes: payload bytes this worker sent.
        staleness: how many updates of others the weights it computed with had not seen; None where it has no meaning.
    """

    step: int
    seconds: float
    wait_s: float
    sent_nbytes: int
    staleness: int | None = None


class Agreement:
    """A mode at work on one optimiser: hooks around `step()`, counters, and state in the optimiser's state_dict.

    A subclass sets up its own state, calls this constructor, and overrides `before_step` (gradients are there),
    `after_step` (the inner optimiser has stepped), `state_dict`, `load_state_dict`, `finish` and `close` as it needs.

    Attributes:
        world: where it communicates.
        step: steps taken so far.
        records: one StepRecord per step, the last `KEPT`.
    """

    KEPT: ClassVar[int] = 10_000

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World) -> None:
        self.model, self.optimizer, self.world = model, optimizer, world
        self.step = 0
        self.records: list[StepRecord] = []
        self._handles = [
            optimizer.register_step_pre_hook(self._before),
            optimizer.register_step_post_hook(self._after),
            optimizer.register_state_dict_post_hook(self._save),
            optimizer.register_load_state_dict_pre_hook(self._load),
        ]

    def before_step(self) -> None:
        """Called in `step()` before the inner optimiser's own."""

    def after_step(self) -> None:
        """Called in `step()` after the inner optimiser's own."""

    def finish(self) -> None:
        """Called by all workers after the last step: leave in the model what this mode trains, the same on all."""

    def predictor(self) -> nn.Module:
        """What predicts after `finish`: the model, or what a mode made of several."""
        return self.model

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside the optimiser's own state: tensors and plain values, no pickle needed."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The reverse of `state_dict`."""
        self.step = int(state["step"])

    def close(self) -> None:
        """Undo `install`: the optimiser steps alone again; threads and sockets end here."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        if getattr(self.optimizer, INSTALLED, None) is self:
            delattr(self.optimizer, INSTALLED)

    def record(self, seconds: float, wait_s: float, sent_nbytes: int, staleness: int | None = None) -> None:
        """Keep what this step was like; called once per step by the subclass."""
        self.records.append(StepRecord(self.step, seconds, wait_s, sent_nbytes, staleness))
        if len(self.records) > self.KEPT:
            del self.records[: self.KEPT // 2]

    def _before(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        if any(value is not None for value in (*args[1:], options.get("closure"))):
            raise BadInput("a distributed optimiser steps without a closure: its gradients are exchanged in step()")
        self.before_step()

    def _after(self, optimizer: torch.optim.Optimizer, args: tuple[Any, ...], options: dict[str, Any]) -> None:
        self.after_step()
        self.step += 1

    def _save(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[KEY] = self.state_dict()

    def _load(self, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        if KEY in kept:
            self.load_state_dict(kept.pop(KEY))
        return kept


def trained_parameters(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[nn.Parameter]:
    """The model's parameters that the optimiser trains, in the model's order.

    Raises:
        BadInput: the optimiser trains parameters that are not the model's.
    """
    trained = {id(p) for group in optimizer.param_groups for p in group["params"]}
    found = [p for p in model.parameters() if id(p) in trained]
    if len(found) != len(trained):
        raise BadInput(f"the optimiser trains {len(trained) - len(found)} parameters that are not the model's")
    return found


def start_alike(model: nn.Module, world: World) -> None:
    """Everyone begins with rank 0's parameters and buffers."""
    tensors = [t.detach() for t in (*model.parameters(), *model.buffers())]
    if world.world_size == 1 or not tensors:
        return
    parts = [t.contiguous().reshape(-1).view(torch.uint8).cpu() for t in tensors]
    whole = broadcast(torch.cat(parts), root=0, group=world)
    for tensor, part in zip(tensors, torch.split(whole, [p.numel() for p in parts]), strict=True):
        tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a copy is aligned for any dtype


class FlatWeights:
    """The trained parameters as one flat float32 vector: each parameter is a view of `values`, nothing is copied.

    What is written to `values` is in the model at once.

    Raises:
        BadInput: parameters that are not float32 on the CPU.
    """

    def __init__(self, parameters: list[nn.Parameter]) -> None:
        for parameter in parameters:
            if parameter.dtype != torch.float32 or parameter.device.type != "cpu":
                text = f"{parameter.dtype} on {parameter.device}"
                raise BadInput(f"this mode averages float32 weights on the CPU; a parameter is {text}")
        self.parameters = parameters
        self.values = torch.empty(sum(p.numel() for p in parameters))
        for parameter, part in self.parts():
            part.copy_(parameter.detach())
            parameter.data = part

    def parts(self) -> Iterator[tuple[nn.Parameter, Tensor]]:
        """Each parameter and the view of `values` that is its own."""
        pieces = torch.split(self.values, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            yield parameter, piece.view(parameter.shape)

    def gradients(self, out: Tensor | None = None) -> Tensor:
        """All gradients as one flat vector, zeros where there is none; written to `out` when given."""
        flat = torch.empty_like(self.values) if out is None else out
        pieces = torch.split(flat, [p.numel() for p in self.parameters])
        for parameter, piece in zip(self.parameters, pieces, strict=True):
            if parameter.grad is None:
                piece.zero_()
            elif parameter.grad.is_sparse:
                raise BadInput("this mode sends dense gradients; use sparse=False, or consistency='hogwild'")
            else:
                piece.copy_(parameter.grad.reshape(-1))
        return flat
