"""How far a tuned model is from torch's own: its outputs, and in training its gradients.

Callers: the tuner. Outputs are judged by the tolerance. Gradients are too, but where a network picks maxima (pooling,
ReLU) the least difference now and then picks another one: torch's own gradients of VGG-16 are 1e-2 from those in
float64. Nobody can be asked to come nearer to them than that, so the tuner looks at this distance as well.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laconic.operators.method_error import relative_error
from laconic.operators.tuned_layers import TunedLayer


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while, so that no statistics of batches change."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


def model_error(
    model: nn.Module, inputs: tuple[Any, ...], native: list[Tensor], train: bool
) -> tuple[float, float]:
    """How far the outputs of a tuned model are from torch's own, and with training its gradients."""
    with evaluating(model), torch.no_grad():
        found = model(*inputs)
    worst = max((relative_error(a, b) for a, b in zip(tensors(found), native, strict=True)), default=0.0)
    if not train:
        return worst, 0.0
    tuned, layers = gradients_of(model, inputs), [m for m in model.modules() if isinstance(m, TunedLayer)]
    for layer in layers:
        layer.trains = False
    plain = gradients_of(model, inputs)
    for layer in layers:
        layer.trains = True
    return worst, max((relative_error(tuned[name], plain[name]) for name in plain), default=0.0)


def gradient_noise(model: nn.Module, inputs: tuple[Any, ...]) -> float:
    """How far torch's own gradients of a model are from those in float64."""
    exact_inputs = tuple(x.double() if isinstance(x, Tensor) and x.is_floating_point() else x for x in inputs)
    exact, plain = gradients_of(copy.deepcopy(model).double(), exact_inputs), gradients_of(model, inputs)
    return max((relative_error(plain[name].double(), exact[name]) for name in plain), default=0.0)


def gradients_of(model: nn.Module, inputs: tuple[Any, ...]) -> dict[str, Tensor]:
    """Gradients of a fixed random combination of the outputs, by parameter."""
    rng = torch.Generator().manual_seed(0)
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    with evaluating(model), torch.enable_grad():
        outputs = [y for y in tensors(model(*inputs)) if y.requires_grad]
        if not outputs or not named:
            return {}
        loss = torch.stack([(y * torch.randn(y.shape, generator=rng).to(y.dtype)).sum() for y in outputs]).sum()
        found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    return {name: grad for name, grad in zip(named, found, strict=True) if grad is not None}


def tensors(output: Any) -> list[Tensor]:
    """The floating tensors in an output, in order."""
    if isinstance(output, Tensor):
        return [output] if output.is_floating_point() else []
    values = output.values() if isinstance(output, Mapping) else output if isinstance(output, (tuple, list)) else []
    return [tensor for value in values for tensor in tensors(value)]
