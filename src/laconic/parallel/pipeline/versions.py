"""Weights of batches that are still under way on a stage that does not wait for them.

Caller: `pipeline.py`. A stage with delay d applies the gradient of batch t − d after its passes of batch t. Forward and
backward passes of one batch use the same weights, those the stage had when the batch came, so each gradient is one of
a model that existed; only it is applied late.

    flush   d = 0                   w(t+1) = w(t) − η ∇f(w(t)), as one process
    2bw     d = 1 on all stages     w(t+1) = w(t) − η ∇f(w(t−1))
    stash   d = stages − 1 − s      w(t+1) = w(t) − η ∇f(w₀(t−n+1), …, wₙ₋₁(t)): stages are late by different steps

Memory: d versions of the stage's weights beside its own.

Source: Narayanan et al., PipeDream, SOSP 2019, §3.3 (weight stashing); Narayanan et al., Memory-Efficient
Pipeline-Parallel DNN Training, ICML 2021 (2BW).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping

from torch import Tensor, nn


class Versions:
    """The versions of one stage's weights; the newest is the stage's own until `end`."""

    def __init__(self, module: nn.Module, delay: int) -> None:
        self._module, self.delay = module, delay
        self._alive: deque[dict[str, Tensor]] = deque()

    @property
    def pending(self) -> int:
        """Batches whose gradient has not been handed over."""
        return len(self._alive)

    def begin(self) -> Mapping[str, Tensor] | None:
        """The weights of a new batch; None where the stage's own serve, as nothing is late."""
        if not self.delay:
            return None
        self._alive.append({n: p.data.requires_grad_(p.requires_grad) for n, p in self._module.named_parameters()})
        return self._alive[-1]

    def end(self, drain: bool = False) -> None:
        """End a batch: hand over the gradient that is due, and point the optimiser to other memory."""
        if not self.delay:
            return
        due = self._alive.popleft() if drain or len(self._alive) > self.delay else {}
        for name, parameter in self._module.named_parameters():
            gradient = due[name].grad if due else None
            if gradient is not None:
                parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
            parameter.data = parameter.data.clone()  # the version keeps what the passes under way have saved
