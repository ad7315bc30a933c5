"""Any torch optimiser as the outer one of `diloco`: it steps the model of all by workers' mean movement.

Caller: `blocks.py`. The optimiser has a parameter for each of the model's, of the same shape, in the memory of the flat
vector θ. When it steps, a fragment's parameters alone have gradients, so that it leaves all others as they are, and
what it remembers of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import BadInput
from laconic.storage.form import check_optimizer

OuterFactory = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def named(make: object) -> str:
    """How a factory is called, which is what ranks compare: a class, a function, or what a partial fills in."""
    function = getattr(make, "func", make)
    given = dict(sorted(getattr(make, "keywords", {}).items()))
    return f"{getattr(function, '__qualname__', type(make).__name__)}{given or ''}"


class OuterOptimizer:
    """An optimiser over θ.

    Args:
        make: takes a list of parameters, as a class of torch.optim does.
        start: θ, which the optimiser steps in place.
        like: the model's parameters, in the order in which they lie in θ.

    Raises:
        BadInput: it does not make an optimiser, or one that needs a closure.
    """

    def __init__(self, make: OuterFactory, start: Tensor, like: Sequence[Tensor]) -> None:
        parts = torch.split(start, [each.numel() for each in like])
        self._parameters = [nn.Parameter(part.view(each.shape)) for part, each in zip(parts, like, strict=True)]
        made: object = make(self._parameters) if callable(make) else None
        if not isinstance(made, torch.optim.Optimizer):
            text = "such as functools.partial(torch.optim.Adam, lr=0.01)"
            raise BadInput(f"outer= takes parameters and returns a torch optimiser, {text}; got {make!r}")
        if isinstance(made, torch.optim.LBFGS):
            raise BadInput("outer= is an optimiser that steps by a gradient alone; LBFGS evaluates the loss again")
        self.optimizer = made

    def step(self, gradient: Tensor, first: int) -> None:
        """Step the values of θ from `first` on by as many of their gradient."""
        at, last = 0, first + gradient.numel()
        for parameter in self._parameters:
            if first <= at < last:
                parameter.grad = gradient[at - first : at - first + parameter.numel()].view(parameter.shape)
            at += parameter.numel()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def forget(self) -> None:
        """Forget all earlier steps."""
        self.optimizer.state.clear()

    def state_dict(self) -> dict[str, Any]:
        return self.optimizer.state_dict()

    def check_state(self, state: Mapping[str, Any]) -> None:
        check_optimizer(state, self.optimizer, "the state of the outer optimiser")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.optimizer.load_state_dict(dict(state))
