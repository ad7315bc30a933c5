"""Save and load a divided model as the whole model: the same keys and shapes, so that any division can resume from it.

Callers: users who write checkpoints. All ranks call `whole_state` and get the same; `load_whole` takes a part.
Optimiser state in the shape of a parameter is gathered as the parameter is.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from laconic.errors import CheckpointError
from laconic.parallel.layer import Layer

Owners = dict[str, tuple[Layer, str]]  # the divided layer and its parameter's name, by key of the state


def owners(model: nn.Module) -> Owners:
    """The owner of every divided parameter."""
    return {
        f"{path}.{name}" if path else name: (layer, name)
        for path, layer in model.named_modules()
        if isinstance(layer, Layer)
        for name in layer.shards
    }


def gather_part(layer: Layer, name: str, part: Tensor) -> Tensor:
    """The whole tensor of which each rank brings the part that it holds of parameter `name`; exact."""
    shard, cut = layer.shards[name], layer.context.exact(f"state of {layer.cut.name}")
    shapes = {rank: shard.part_shape(rank) for rank in range(cut.size)}
    came = cut.swap("forward", dict.fromkeys(range(cut.size), part.detach()), shapes, part.dim())
    whole = torch.empty(shard.shape, dtype=part.dtype, device=part.device)
    for rank, piece in came.items():
        shard.put(whole, rank, piece)
    return whole


def whole_state(model: nn.Module, optimizer: Optimizer | None = None) -> dict[str, Any]:
    """The state_dict of the whole model; with an optimiser, {"model": …, "optimizer": …} of both. All ranks call it.

    Raises:
        CheckpointError: the optimiser's state of a divided parameter has another shape.
    """
    divided = owners(model)
    state = {
        key: gather_part(*divided[key], value) if key in divided else value.detach().clone()
        for key, value in model.state_dict().items()
    }
    if optimizer is None:
        return state
    kept = optimizer.state_dict()
    for index, (key, parameter) in _numbered(model, optimizer).items():
        for name, value in kept["state"].get(index, {}).items() if key in divided else ():
            if _of_its_shape(key, name, value, tuple(parameter.shape)):
                kept["state"][index] = {**kept["state"][index], name: gather_part(*divided[key], value)}
    return {"model": state, "optimizer": kept}


def load_whole(model: nn.Module, state: Mapping[str, Any], optimizer: Optimizer | None = None) -> None:
    """Load what `whole_state` gave, or a plain model's state_dict, into this division; each rank takes its part.

    Raises:
        CheckpointError: keys or shapes are not this model's, or the optimiser's state cannot be divided.
    """
    divided, given = owners(model), state["model"] if optimizer is not None else state
    wanted = model.state_dict()
    if wanted.keys() != given.keys():
        odd = sorted(wanted.keys() ^ given.keys())
        raise CheckpointError(f"the state is not this model's: '{odd[0]}' is only in one of them")
    parts = {}
    for key, value in wanted.items():
        shape = divided[key][0].shards[divided[key][1]].shape if key in divided else tuple(value.shape)
        if tuple(given[key].shape) != shape:
            raise CheckpointError(f"'{key}' is {tuple(given[key].shape)} in the state and {shape} in the model")
        parts[key] = _part(divided, key, given[key])
    if optimizer is not None:
        kept = dict(state["optimizer"])
        entries = {index: dict(entry) for index, entry in kept["state"].items()}
        for index, (key, _) in _numbered(model, optimizer).items():
            for name, value in entries.get(index, {}).items() if key in divided else ():
                layer, own = divided[key]
                if _of_its_shape(key, name, value, layer.shards[own].shape):
                    entries[index][name] = _part(divided, key, value)
        optimizer.load_state_dict({**kept, "state": entries})
    model.load_state_dict(parts)


def _of_its_shape(key: str, name: str, value: object, shape: tuple[int, ...]) -> bool:
    """Whether optimiser state is per value of a parameter, or a scalar; CheckpointError for other shapes.

    Other shapes, such as Adafactor's rows and columns, cannot be joined from the ranks' parts.
    """
    if not isinstance(value, Tensor) or (value.numel() == 1 and tuple(value.shape) != shape):
        return False
    if tuple(value.shape) != shape:
        text = f"'{name}' of '{key}' is {tuple(value.shape)} in the optimiser's state, and the parameter {shape}"
        raise CheckpointError(f"{text}: it can be made neither whole nor divided")
    return True


def _part(divided: Owners, key: str, whole: Tensor) -> Tensor:
    if key not in divided:
        return whole
    layer, name = divided[key]
    return layer.shards[name].take(whole, layer.cut.rank)


def _numbered(model: nn.Module, optimizer: Optimizer) -> dict[int, tuple[str, Tensor]]:
    """Key and parameter by the number under which an optimiser keeps its state."""
    keys = {id(parameter): key for key, parameter in model.named_parameters()}
    listed = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {index: (keys.get(id(parameter), ""), parameter) for index, parameter in enumerate(listed)}
