"""Keep weights pruned and shared during training, with any optimiser and any number of workers.

Callers: the pipeline, users. A constrained weight is computed from what the optimiser holds: a pruned one from the
weight times its mask, a shared one from its values. So no step, momentum or decay can bring a pruned weight back; the
gradient of a value is the mean of its weights' gradients; and under `laconic.distribute` workers exchange a codebook of
a few values instead of a matrix.

A step by the mean moves a value as far as its weights would have moved together, so the rate that suits weights suits
values too. By the sum, a step is as many times larger as there are weights, and diverges at that rate.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from laconic.errors import BadInput
from laconic.shrinking.parts import Shared, half


class _Masked(nn.Module):
    """weight = what is trained · mask."""

    mask: Tensor

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask.float())

    def forward(self, trained: Tensor) -> Tensor:
        return trained * self.mask

    def right_inverse(self, weight: Tensor) -> Tensor:
        return weight


class _Gather(torch.autograd.Function):
    """values[symbols]; the gradient of a value is the mean over its weights, of zero none."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, symbols: Tensor, counts: Tensor) -> Tensor:
        ctx.save_for_backward(symbols, counts)
        return torch.cat([values.new_zeros(1), values])[symbols]

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        symbols, counts = ctx.saved_tensors
        sums = torch.bincount(symbols.reshape(-1), gradients[0].reshape(-1), minlength=len(counts))
        return (sums / counts)[1:].to(gradients[0].dtype), None, None


class _FewValues(nn.Module):
    """weight = values[symbols]; the values are trained, and symbol 0 is a pruned weight."""

    def __init__(self, shared: Shared) -> None:
        super().__init__()
        self.register_buffer("symbols", torch.from_numpy(shared.symbols.astype(np.int64)))
        counts = np.bincount(shared.symbols.reshape(-1), minlength=len(shared.values))
        self.register_buffer("counts", torch.from_numpy(np.maximum(counts, 1)))
        self.start = torch.from_numpy(shared.values[1:].copy())

    def forward(self, values: Tensor) -> Tensor:
        result: Tensor = _Gather.apply(values, self.symbols, self.counts)  # type: ignore[no-untyped-call]
        return result

    def right_inverse(self, weight: Tensor) -> Tensor:
        return self.start


@contextlib.contextmanager
def masked(model: nn.Module, masks: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """Keep weights pruned inside the block, whatever trains them; afterwards the model is a plain one again.

    >>> model = nn.Linear(2, 1, bias=False)
    >>> with masked(model, {"weight": torch.tensor([[True, False]])}):
    ...     optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    ...     model(torch.ones(1, 2)).sum().backward()
    ...     optimizer.step()
    >>> float(model.weight.detach()[0, 1])
    0.0
    """
    with _constrained(model, {name: _Masked(mask) for name, mask in masks.items()}):
        yield model


@contextlib.contextmanager
def shared(model: nn.Module, parts: dict[str, Shared]) -> Iterator[nn.Module]:
    """Make weights share values inside the block; the trained values are then in `parts`."""
    ways = {name: _FewValues(part) for name, part in parts.items()}
    with _constrained(model, ways):
        try:
            yield model
        finally:
            for name, part in parts.items():
                module, attribute = owner(model, name)
                trained = module.parametrizations[attribute].original.detach().numpy()  # type: ignore[index, union-attr]
                values = np.concatenate([np.zeros(1, np.float32), half(trained.astype(np.float32))])
                parts[name] = Shared(part.symbols, values)
    load(model, parts)


@torch.no_grad()
def load(model: nn.Module, parts: Mapping[str, Any]) -> None:
    """Give the model's tensors the values of parts."""
    state = model.state_dict()
    for name, part in parts.items():
        state[name].copy_(part.dense())


def copy_of(model: nn.Module) -> nn.Module:
    """A copy of a model, without its gradients.

    Raises:
        BadInput: torch cannot copy it, as where some weights are computed from others by a hook.
    """
    try:
        copied = deepcopy(model)
    except RuntimeError as error:
        cure = "first make pruning and norms of torch.nn.utils permanent (prune.remove, remove_weight_norm)"
        raise BadInput(f"the model cannot be copied: {cure}") from error
    copied.zero_grad()
    return copied


@contextlib.contextmanager
def _constrained(model: nn.Module, ways: Mapping[str, nn.Module]) -> Iterator[None]:
    others = tied(model)
    with contextlib.ExitStack() as stack:
        for name, way in ways.items():
            module, attribute = owner(model, name)
            followers = {owner(model, other) for other in others.get(name, ())}
            for each in followers - {(module, attribute)}:  # which is one module in two places
                stack.enter_context(_following(*each, module, attribute))
            stack.enter_context(_parametrised(module, attribute, way))
        yield


@contextlib.contextmanager
def _parametrised(module: nn.Module, attribute: str, way: nn.Module) -> Iterator[None]:
    """Parametrise a parameter inside the block."""
    order = list(module._parameters)
    getattr(module, attribute).grad = None  # torch keeps the gradient where the shape changes
    parametrize.register_parametrization(module, attribute, way)
    try:
        yield
    finally:
        parametrize.remove_parametrizations(module, attribute)
        getattr(module, attribute).grad = None
        _reorder(module, order)  # torch puts what was constrained behind the others


@contextlib.contextmanager
def _following(follower: nn.Module, name: str, module: nn.Module, attribute: str) -> Iterator[None]:
    """Make a module with a tied parameter use the owner's computed value inside the block."""
    order = list(follower._parameters)
    del follower._parameters[name]
    hook = follower.register_forward_pre_hook(lambda *_: setattr(follower, name, getattr(module, attribute)))
    try:
        yield
    finally:
        hook.remove()
        follower.__dict__.pop(name, None)
        follower._parameters[name] = module._parameters[attribute]
        _reorder(follower, order)


def _reorder(module: nn.Module, order: list[str]) -> None:
    for each in order:
        module._parameters[each] = module._parameters.pop(each)


def tied(model: nn.Module) -> dict[str, list[str]]:
    """The other names of parameters that have several, by the first of each.

    >>> model = nn.Sequential(nn.Embedding(3, 2), nn.Linear(2, 3, bias=False))
    >>> model[1].weight = model[0].weight
    >>> tied(model)
    {'0.weight': ['1.weight']}
    """
    places: dict[Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        places.setdefault(parameter, []).append(name)
    return {names[0]: names[1:] for names in places.values() if len(names) > 1}


def tie(model: nn.Module, name: str, to: str) -> None:
    """Tie a parameter to another."""
    (module, attribute), (other, source) = owner(model, name), owner(model, to)
    setattr(module, attribute, getattr(other, source))


def owner(model: nn.Module, name: str) -> tuple[nn.Module, str]:
    """The module that has a parameter, and its name there."""
    path, _, attribute = name.rpartition(".")
    return model.get_submodule(path), attribute
