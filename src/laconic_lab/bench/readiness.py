"""When a step makes each gradient and needs each weight, and the lower bounds of a step's time that follow.

Callers: `bench/step.py`, which watches a step without any exchange.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class Readiness:
    """When a step without exchange makes gradients and needs weights; times are shares of the step.

    Attributes:
        shares: (when a gradient came, what share of all values it has), in the order of time.
        backward: when backward ended.
        needed: when the forward first used the weights of each of `shares`.
    """

    shares: tuple[tuple[float, float], ...]
    backward: float
    needed: tuple[float, ...] = ()

    def ddp_bound_seconds(self, compute_s: float, wire_s: float) -> float:
        """The least time of a step whose optimiser waits for all gradients to have been sent.

        >>> Readiness(((0.5, 0.5), (0.75, 0.5)), 0.75).ddp_bound_seconds(compute_s=4.0, wire_s=6.0)
        9.0
        """
        sent_s = compute_s * self.backward
        wire_free_s = 0.0
        for passed, share in self.shares:
            wire_free_s = max(wire_free_s, compute_s * passed) + wire_s * share
        return max(sent_s, wire_free_s) + compute_s * (1 - self.backward)

    def layer_bound_seconds(self, compute_s: float, wire_s: float) -> float:
        """The least time of a step in which every weight waits only for its own gradient.

        A gradient cannot travel from when the forward uses its weights to when backward has made it. So for any two
        moments a < b, what is needed by a and made from b on takes its time on the wire beside all computing between.

        >>> two = Readiness(((0.5, 0.5), (1.0, 0.5)), 1.0, needed=(0.25, 0.0))
        >>> two.layer_bound_seconds(compute_s=4.0, wire_s=4.0)
        6.0
        """
        rows = [(needed, made, share) for needed, (made, share) in zip(self.needed, self.shares, strict=False)]
        least = 0.0
        for a, _, _ in rows:
            for _, b, _ in rows:
                sent = sum(share for needed, made, share in rows if needed <= a and made >= b)
                if a < b and sent:
                    least = max(least, wire_s * sent + compute_s * (b - a))
        return least


def watch(module: nn.Module, optimizer: torch.optim.Optimizer, run: Callable[[], float]) -> Readiness:
    """Note when each gradient comes and each weight is first used in a step; `run` trains it, returning its start."""
    came: list[tuple[float, Tensor]] = []
    used: dict[int, float] = {}

    def use(each: nn.Module, _: object) -> None:
        for parameter in each.parameters(recurse=False):
            used.setdefault(id(parameter), time.perf_counter())

    hooks: list[Any] = [
        p.register_post_accumulate_grad_hook(
            lambda p: came.append((time.perf_counter(), p))
        )
        for p in module.parameters()
    ]
    hooks += [each.register_forward_pre_hook(use) for each in module.modules()]
    stepped: list[float] = []
    hooks.append(optimizer.register_step_pre_hook(lambda *_: stepped.append(time.perf_counter())))
    begun = run()
    seconds, numel = time.perf_counter() - begun, sum(p.numel() for _, p in came)
    for hook in hooks:
        hook.remove()
    shares = tuple(((at - begun) / seconds, p.numel() / numel) for at, p in came)
    # what no module's forward announces may be needed as late as its gradient is made
    needed = tuple((used.get(id(p), at) - begun) / seconds for at, p in came)
    return Readiness(shares, (stepped[0] - begun) / seconds, needed)
