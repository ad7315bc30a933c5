"""Muon: matrices move by their orthonormalised momentum, all else by AdamW."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.optim.base import Parameters, check_rates, in_float32

NEWTON_SCHULZ = (
    3.4445,
    -4.7750,
    2.0315,
)  # a, b, c of the paper's quintic: steep at 0, singular values end in 0.7 to 1.2


class Muon(torch.optim.Optimizer):
    """Orthonormalised momentum for matrices, AdamW for the rest, at one learning rate.

    It exchanges nothing: give it to `distribute` (mode sync, local or diloco) or to a model that `compress` was called
    on. For a matrix X of m × n with gradient G (a convolution's weight is m × its other sides):
    M ← μM + G;  U = μM + G (Nesterov), or M;  O = NS₅(U/‖U‖);  X ← X − lr·(0.2·√max(m, n)·O + weight_decay·X),
    where a step of NS is Y ← aY + (bYYᵀ + c(YYᵀ)²)Y. The factor 0.2·√max(m, n) gives O the root mean square that
    AdamW's steps have, so that its learning rates and decays hold for both parts.
    Other parameters:  m, v as in Adam, with bias correction;  x ← x − lr·(m̂/(√v̂ + ε) + weight_decay·x).

    Cost: five steps of three matrix products, about 15·(2·m·n·min(m, n)) floating-point operations a matrix; one
    buffer for a matrix, two for the rest.

    Args:
        params: parameters or groups. A group's `matrices` says which part its members take: None (the default) goes by
            shape, False is AdamW for all, as for embeddings and the last layer.
        momentum: μ.
        betas, eps: of the AdamW part.
        iterations: Newton–Schulz steps.

    Raises:
        BadInput: a number is out of range, a gradient is sparse, or `matrices` is True for what has one dimension.

    >>> layer = torch.nn.Linear(8, 4)
    >>> optimizer = Muon([{"params": [layer.weight]}, {"params": [layer.bias], "weight_decay": 0.0}], lr=0.01)
    >>> layer(torch.ones(2, 8)).sum().backward()
    >>> optimizer.step()

    Source: Jordan et al., Muon: An optimizer for hidden layers in neural networks, 2024; the factor: Liu et al., Muon
    is Scalable for LLM Training, 2025, §2.2.
    Differs: in float32 for any type of weights, where the first has bfloat16; torch.optim.Muon takes matrices only.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        momentum: float = 0.95,
        weight_decay: float = 0.1,
        betas: tuple[float, float] = (0.9, 0.95),
        eps: float = 1e-8,
        nesterov: bool = True,
        iterations: int = 5,
    ) -> None:
        check_rates(lr, (momentum, *betas), eps=eps, weight_decay=weight_decay)
        if iterations < 1:
            raise BadInput(f"iterations is at least 1, got {iterations}")
        defaults = {
            "lr": lr, "momentum": momentum, "weight_decay": weight_decay, "betas": betas, "eps": eps,
            "nesterov": nesterov, "iterations": iterations, "matrices": None,
        }  # fmt: skip
        super().__init__(params, defaults)
        in_float32(self)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; BadInput if its vectors are said to be matrices."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if group["matrices"] and any(p.dim() < 2 for p in group["params"]):
            raise BadInput("matrices=True is for parameters with two dimensions or more; put the others into a group")

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Take a step with the gradients as they are."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                if parameter.grad.is_sparse:
                    raise BadInput("Muon takes dense gradients; make the embedding sparse=False")
                matrix = parameter.dim() > 1 and group["matrices"] is not False
                by = (self._orthonormal if matrix else self._adam)(group, parameter, parameter.grad.float())
                value = parameter.float()
                parameter.copy_(value - group["lr"] * (by + group["weight_decay"] * value))
        return loss

    def _orthonormal(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        momentum = self._kept(parameter, "momentum").mul_(group["momentum"]).add_(gradient)
        update = gradient.add(momentum, alpha=group["momentum"]) if group["nesterov"] else momentum
        matrix = update.reshape(update.shape[0], -1)
        scale = 0.2 * math.sqrt(max(matrix.shape))
        step: Tensor = scale * orthonormalised(matrix, int(group["iterations"]))
        return step.reshape(parameter.shape)

    def _adam(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> Tensor:
        (first, second), state = group["betas"], self.state[parameter]
        m, v = self._kept(parameter, "exp_avg"), self._kept(parameter, "exp_avg_sq")
        state["step"] = state.get("step", torch.tensor(0.0)) + 1
        m.mul_(first).add_(gradient, alpha=1 - first)
        v.mul_(second).addcmul_(gradient, gradient, value=1 - second)
        step = float(state["step"])
        by: Tensor = (m / (1 - first**step)) / ((v / (1 - second**step)).sqrt() + group["eps"])
        return by

    def _kept(self, parameter: Tensor, name: str) -> Tensor:
        state = self.state[parameter]
        if name not in state:
            state[name] = torch.zeros_like(parameter, dtype=torch.float32, memory_format=torch.contiguous_format)
        kept: Tensor = state[name]
        return kept


def orthonormalised(matrix: Tensor, iterations: int = 5) -> Tensor:
    """About UVᵀ of the matrix USVᵀ, by Newton–Schulz; zeros stay zeros.

    >>> found = orthonormalised(torch.diag(torch.tensor([3.0, 2.0])))
    >>> bool(((found.diagonal() > 0.6) & (found.diagonal() < 1.3)).all())
    True
    """
    a, b, c = NEWTON_SCHULZ
    wide = matrix if matrix.shape[0] <= matrix.shape[1] else matrix.T
    y = wide / wide.norm().clamp_min(1e-12)
    for _ in range(iterations):
        square = y @ y.T
        y = a * y + (b * square + c * square @ square) @ y
    found: Tensor = y if matrix.shape[0] <= matrix.shape[1] else y.T
    return found
