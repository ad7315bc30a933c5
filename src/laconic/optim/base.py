"""The base of this package's optimisers: one flat vector of all gradients, its exchanges, and state that resumes.

Callers: one file each beside this one, which says in `_update` what a step does. Registering a class
(`@OPTIMIZERS.register(NAME)`) is enough to be tried by the conformance suite.

Invariant: what is exchanged is the same on all workers, and so are the weights after `step()` or, where an optimiser
takes steps alone, after every exchange.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.codecs import Codec
from laconic.errors import BadInput
from laconic.exchange.collectives import broadcast
from laconic.exchange.layout import neighbours
from laconic.exchange.likeness import check_alike, have_equal
from laconic.exchange.options import Options, refuse_unsized
from laconic.exchange.overflow import overflowed
from laconic.exchange.ownership import check_owner, owned
from laconic.exchange.state import CompressionState
from laconic.registry import Registry
from laconic.transports.world import World, current

OPTIMIZERS: Registry[type[ExchangingOptimizer]] = Registry("optimiser", "laconic.optim")
KEY = "laconic"  # where a state_dict holds what is still to be sent
Parameters = Iterable[Tensor] | Iterable[dict[str, Any]] | Iterable[tuple[str, Tensor]]


class ExchangingOptimizer(torch.optim.Optimizer, ABC):
    """An optimiser that agrees with the other workers by itself; all begin with rank 0's weights.

    Gradients are each worker's own: do not wrap the model in DDP. Weights may be bfloat16 or float16; what is kept and
    exchanged is float32. Alone, nothing is sent, and no codec is applied. Parameters that need no gradient when the
    optimiser is made stay as they are. Under torch.amp.GradScaler, all workers skip a step that overflowed on any.

    Args:
        codec: what large parameters are sent through, with error feedback; biases and small ones are exact.
        world: where to communicate; None is the default world.

    Attributes:
        sent_nbytes: payload bytes that this worker's steps have sent.

    Raises:
        BadInput: a gradient is sparse, no parameter needs one, or a number is out of range.
        Mismatch: another worker has other parameters or other options.
    """

    name: ClassVar[str]
    _step_supports_amp_scaling: ClassVar[bool] = True  # by this GradScaler leaves unscaling, and skipping, to `step`

    def __init__(
        self, params: Parameters, defaults: dict[str, Any], *, codec: str | Codec = "none", world: World | None = None
    ) -> None:
        super().__init__(params, {**defaults, "step": 0})
        self.world = world or current()
        groups = enumerate(self.param_groups)
        held = [(number, p) for number, group in groups for p in group["params"] if p.requires_grad]
        if not held:
            raise BadInput(f"{type(self).__name__} has nothing to train: no parameter needs a gradient")
        self._parameters, self._group_of = [p for _, p in held], [number for number, _ in held]
        self._numels = [p.numel() for p in self._parameters]
        named = [(f"parameter {number}", p) for number, p in enumerate(self._parameters)]
        options = Options(world=self.world)
        self._exact, self._coded = (CompressionState(each, named, options) for each in ("none", codec))
        refuse_unsized(self._coded.buckets.choice, options.algorithm, self.world.transport)
        self._buckets = list(neighbours(self._parameters))
        shapes = [(name, str(tuple(p.shape))) for name, p in named]
        self.sent_nbytes = 0
        chosen = sorted((k, str(v)) for k, v in defaults.items())
        check_alike(type(self).__name__, [("codec", str(codec)), *chosen, *shapes], self.world.transport)
        self._start_alike()
        self.register_state_dict_post_hook(self._save)
        self.register_load_state_dict_pre_hook(self._load)
        in_float32(self)

    def close(self) -> None:
        """End the exchange threads; the optimiser steps no more."""
        self._exact.close()
        self._coded.close()

    @property
    def alone(self) -> bool:
        """Whether there is only one worker."""
        return self.world.world_size == 1

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step together with all workers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if not overflowed(self, self.world):
            sent_before = self.world.transport.counters.total_sent_nbytes
            self._update(self._gradients())
            self.sent_nbytes += self.world.transport.counters.total_sent_nbytes - sent_before
            for group in self.param_groups:
                group["step"] += 1
        return loss

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group while the optimiser is made; BadInput later, for what is exchanged is laid out then."""
        if hasattr(self, "_parameters"):
            raise BadInput(f"{type(self).__name__} takes no further parameters; make another one of all of them")
        super().add_param_group(param_group)

    @abstractmethod
    def _update(self, gradients: Tensor) -> None:
        """One step, given this worker's gradients as one float32 vector, which may be written to."""

    # what is exchanged

    def mean(self, values: Tensor, *, coded: bool = False) -> Tensor:
        """Replace a vector laid out as the parameters by its mean over all workers, exact or through the codec."""
        if not self.alone:
            parts = torch.split(values, [numel for numel, _ in self._buckets])
            state = self._coded if coded else self._exact
            state.buckets.exchange([(part, held) for part, (_, held) in zip(parts, self._buckets, strict=True)])
        return values

    # layout

    def pieces(self, *vectors: Tensor) -> Iterator[tuple[dict[str, Any], nn.Parameter, list[Tensor]]]:
        """Each parameter with its group, and its part of each flat vector in its shape."""
        parts = zip(*(torch.split(vector, self._numels) for vector in vectors), strict=True)
        groups = (self.param_groups[number] for number in self._group_of)
        for group, parameter, part in zip(groups, self._parameters, parts, strict=True):
            yield group, parameter, [each.view(parameter.shape) for each in part]

    def flat(self, name: str) -> Tensor:
        """Every parameter's state under `name`, copied into one vector; zeros before the first step."""
        return torch.cat([self._kept(parameter, name).reshape(-1) for parameter in self._parameters])

    def keep(self, name: str, vector: Tensor) -> None:
        """Keep a vector as every parameter's `name`."""
        for _, parameter, (part,) in self.pieces(vector):
            self._kept(parameter, name).copy_(part)

    def move(self, parameter: Tensor, by: Tensor, weight_decay: float, lr: float) -> None:
        """x ← x − lr·(by + weight_decay·x), in float32 whatever the parameter's type."""
        value = parameter.detach().float()
        parameter.copy_(value - lr * (by + weight_decay * value))

    def _kept(self, parameter: Tensor, name: str) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        kept: Tensor = state[name]
        return kept

    def _gradients(self) -> Tensor:
        held = set(map(id, self._parameters))
        if any(parameter.grad is not None and id(parameter) not in held for parameter in self._everything()):
            raise BadInput(f"a parameter needs gradients since {type(self).__name__} was made; make another one")
        found = []
        for parameter in self._parameters:
            if parameter.grad is None:
                found.append(torch.zeros(parameter.numel(), device=parameter.device))
            elif parameter.grad.is_sparse:
                raise BadInput(f"{type(self).__name__} takes dense gradients; make the embedding sparse=False")
            else:
                found.append(parameter.grad.detach().reshape(-1).float())
        return torch.cat(found)

    @torch.no_grad()
    def _start_alike(self) -> None:
        if not self.alone and not have_equal(self._everything(), self.world.transport):
            for parameter in self._everything():
                parameter.copy_(broadcast(parameter.detach().clone(), root=0, group=self.world))

    def _everything(self) -> list[Tensor]:
        """All parameters, also those that stay as they are, in the order in which torch numbers them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # state

    def _save(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[KEY] = owned(self._coded.state_dict(), self.world.rank, self.world.world_size)

    def _load(self, _: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        kept = dict(state)
        if KEY not in kept:
            raise BadInput(f"this is no state of {type(self).__name__}: it has no '{KEY}'")
        coming = kept.pop(KEY)
        check_owner(coming, self.world)
        self._coded.load_state_dict(coming)
        return kept


def in_float32(optimizer: torch.optim.Optimizer) -> None:
    """Let an optimiser's state be loaded as it was saved: torch turns it into the parameters' type."""
    coming: dict[int, dict[str, Any]] = {}

    def note(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        coming.clear()
        coming.update(state["state"])

    def restore(loaded: torch.optim.Optimizer) -> None:
        everything = [parameter for group in loaded.param_groups for parameter in group["params"]]
        for number, values in coming.items():
            for name, value in values.items():
                loaded.state[everything[number]][name] = value.to(everything[number].device, copy=True)
        coming.clear()

    optimizer.register_load_state_dict_pre_hook(note)
    optimizer.register_load_state_dict_post_hook(restore)


def check_rates(lr: float, betas: Iterable[float] = (), **others: float) -> None:
    """Refuse rates below zero, betas outside [0, 1), and whatever else is below zero."""
    for name, value in {"lr": lr, **others}.items():
        if not value >= 0:
            raise BadInput(f"{name} is at least 0, got {value}")
    for beta in betas:
        if not 0 <= beta < 1:
            raise BadInput(f"a beta is at least 0 and below 1, got {beta}")
