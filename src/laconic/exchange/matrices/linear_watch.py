"""Captures (o, δ) of every nn.Linear in backward: the layer's input and the gradient of its output.

Callers: `factors.py` takes what was caught when the layer's bucket is ready, which is after backward has passed the
layer. Invariant: per layer no more than the memory of its weight is held, and nothing once it has been taken.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Linear:
    """A fully connected layer by the names of its parameters; `bias` is None where it has none that is trained."""

    weight: str
    bias: str | None
    c_in: int
    c_out: int


class LinearWatch:
    """The (o, δ) of a model's nn.Linear layers since they were last taken.

    A layer that is called more than once before that, or by several backward passes (no_sync), has several pairs; its
    gradient is the sum of all δᵀ o. Left out are layers of other dtypes than float32, on other devices than the
    processor, frozen ones, and calls that autocast runs in another dtype; their gradients are sent as they are.

    Args:
        model: the module inside DDP.
        names: each parameter's name, by its id.
    """

    def __init__(self, model: nn.Module, names: Mapping[int, str]) -> None:
        self.layers: dict[str, Linear] = {}
        self._caught: dict[str, list[tuple[Tensor, Tensor]] | None] = {}  # None: more than is worth holding
        self._handles: list[Any] = []
        for module in model.modules():
            if isinstance(module, nn.Linear) and _suits(module) and id(module.weight) in names:
                bias = names.get(id(module.bias)) if module.bias is not None and module.bias.requires_grad else None
                layer = Linear(names[id(module.weight)], bias, module.in_features, module.out_features)
                self.layers[layer.weight] = layer
                self._handles.append(module.register_forward_hook(functools.partial(self._forward, layer)))

    def _forward(self, layer: Linear, module: nn.Module, args: tuple[Any, ...], output: Tensor) -> None:
        """Hook the gradient of this output. The input is held by the autograd graph, and freed with it."""
        if args and isinstance(args[0], Tensor) and output.requires_grad:
            # With more than two dimensions the output is a view; when it is changed in place, say by a ReLU, autograd
            # goes round the view, so the product behind it is asked.
            product = output if output._base is None else output._base
            product.register_hook(
                functools.partial(self._backward, layer, args[0].detach())
            )

    def _backward(self, layer: Linear, o: Tensor, delta: Tensor) -> None:
        held = self._caught.setdefault(layer.weight, [])
        if held is None:
            return
        plain = o.dtype == delta.dtype == torch.float32 and o.device.type == delta.device.type == "cpu"
        rows = sum(delta.shape[0] for _, delta in held) + delta.numel() // layer.c_out
        if not plain or rows * (layer.c_in + layer.c_out) >= layer.c_in * layer.c_out:
            self._caught[layer.weight] = None
        else:
            held.append((o.reshape(-1, layer.c_in), delta.detach().reshape(-1, layer.c_out)))

    def take(self, weight: str) -> tuple[Tensor, Tensor] | None:
        """(o, δ) of a layer, all its calls one below the other; None where they would be no smaller than the weight."""
        held = self._caught.pop(weight, None)
        if not held:
            return None
        return held[0] if len(held) == 1 else (torch.cat([o for o, _ in held]), torch.cat([d for _, d in held]))

    def clear(self) -> None:
        """Release everything captured."""
        self._caught.clear()

    def close(self) -> None:
        """Take the hooks off the model; safe to call twice."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()


def _suits(module: nn.Linear) -> bool:
    weight = module.weight
    return weight.requires_grad and weight.dtype == torch.float32 and weight.device.type == "cpu"
