"""A divided model beside the whole one: outputs, gradients of inputs and weights, running statistics."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.parallel.divide import divide
from laconic.parallel.state import gather_part, owners
from laconic.transports.threads import run_threads
from laconic.transports.world import World


def gradients(model: nn.Module) -> dict[str, Tensor]:
    """Whole gradients of a divided model, by parameter."""
    divided = owners(model)
    found = {}
    for key, parameter in model.named_parameters():
        gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        found[key] = gather_part(*divided[key], gradient) if key in divided else gradient
    return found


def close(one: Tensor, two: Tensor, tolerance: float, what: str) -> None:
    """Within `tolerance` of the larger of 1 and the largest value."""
    one, two = one.detach(), two.detach()
    error = float((one - two).abs().max()) if one.numel() else 0.0
    scale = max(1.0, float(two.abs().max()) if two.numel() else 0.0)
    assert one.shape == two.shape, what
    assert error <= tolerance * scale, f"{what}: {error:g} of {scale:g}"


def check(
    model: nn.Module, plan: Any, ranks: int, x: Tensor, *, rows: Sequence[int] | None = None, tolerance: float = 1e-12
) -> None:
    """Compare on `ranks` threads; with `rows` each rank brings so many, else all bring the whole batch."""
    torch.manual_seed(7)
    whole, given = copy.deepcopy(model), x.clone().requires_grad_(x.is_floating_point())
    expected = whole(given)
    weights = torch.randn_like(expected)
    count = x.shape[0]
    (expected * weights).sum().div(count).backward()
    grads = {key: p.grad for key, p in whole.named_parameters()}
    edges = None if rows is None else [sum(rows[:rank]) for rank in range(ranks + 1)]

    def work(transport):  # type: ignore[no-untyped-def]
        rank = transport.rank
        own = slice(None) if edges is None else slice(edges[rank], edges[rank + 1])
        part = divide(copy.deepcopy(model), plan, world=World(transport))
        mine = x[own].clone().requires_grad_(x.is_floating_point())
        y = part(mine)
        (y * weights[own]).sum().div(mine.shape[0]).backward()
        close(y, expected[own], tolerance, f"output of rank {rank}")
        if mine.grad is not None:
            back = mine.grad if rows is None else mine.grad / ranks  # it sees the sum of the ranks' losses
            close(back, given.grad[own], tolerance, f"gradient of the input of rank {rank}")
        for key, gradient in gradients(part).items():
            close(gradient, grads[key], tolerance, f"gradient of {key} on rank {rank}")
        buffers = dict(whole.named_buffers())
        for key, buffer in part.named_buffers():
            close(buffer, buffers[key], tolerance, f"buffer {key}")
        return True

    assert all(run_threads(ranks, work))

