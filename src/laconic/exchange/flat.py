"""Gradients side by side in a few flat buffers, so that an exchange finds them without a gather per parameter.

Callers: `consistency`. A gradient is copied into its place as soon as autograd has made it, while it is still in the
cache; from then on `parameter.grad` is a view of the buffer, and the optimiser reads the mean from there. Exempt
parameters lie together at the end of their buffer. Accumulation over several backwards adds in place.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class FlatBuffer:
    """One buffer and the parameters whose gradients lie in it, in order."""

    values: Tensor
    parameters: tuple[nn.Parameter, ...]
    views: tuple[Tensor, ...]


class FlatGradients:
    """Flat buffers for the gradients of these parameters, in the order backward makes them: the last layers first.

    Args:
        parameters: in the model's order; those that need no gradient are left out.
        nbytes: a buffer is closed when it holds at least this much.
        exempt: whether a parameter is sent exactly, and so lies at the end of its buffer.
    """

    def __init__(self, parameters: Sequence[nn.Parameter], nbytes: int, exempt: Callable[[nn.Parameter], bool]) -> None:
        groups: list[list[nn.Parameter]] = [[]]
        for parameter in reversed([p for p in parameters if p.requires_grad]):
            alike = not groups[-1] or _kind(groups[-1][0]) == _kind(parameter)
            if not alike or sum(4 * p.numel() for p in groups[-1]) >= nbytes:
                groups.append([])
            groups[-1].append(parameter)
        self.buffers = [_flat(sorted(group, key=exempt)) for group in groups if group]
        places = [pair for buffer in self.buffers for pair in zip(buffer.parameters, buffer.views, strict=True)]
        self._places = {id(parameter): view for parameter, view in places}
        self._handles = [
            parameter.register_post_accumulate_grad_hook(self._place)  # type: ignore[no-untyped-call]
            for parameter, _ in places
        ]

    def _place(self, parameter: Tensor) -> None:
        """Move a new gradient to its place."""
        view, gradient = self._places[id(parameter)], parameter.grad
        if gradient is not None and gradient.data_ptr() != view.data_ptr():
            view.copy_(gradient)
            parameter.grad = view

    def holds(self, parameter: Tensor) -> bool:
        """Whether this parameter's gradient has a place."""
        return id(parameter) in self._places

    def complete(self) -> None:
        """Zeros where this rank has made no gradient: another may have."""
        for buffer in self.buffers:
            for parameter, view in zip(buffer.parameters, buffer.views, strict=True):
                if parameter.grad is None:
                    view.zero_()
                    parameter.grad = view
                else:
                    self._place(parameter)

    def close(self) -> None:
        """Take the hooks off the parameters."""
        for handle in self._handles:
            handle.remove()


def _kind(parameter: Tensor) -> tuple[torch.dtype, torch.device]:
    return parameter.dtype, parameter.device


def _flat(parameters: Sequence[nn.Parameter]) -> FlatBuffer:
    like = parameters[0]
    values = torch.zeros(sum(p.numel() for p in parameters), dtype=like.dtype, device=like.device)
    parts = torch.split(values, [p.numel() for p in parameters])
    views = tuple(part.view(p.shape) for part, p in zip(parts, parameters, strict=True))
    return FlatBuffer(values, tuple(parameters), views)
