"""Dion: orthonormal updates of low rank, whose factors are all that is sent."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.collectives import all_reduce
from laconic.optim.base import OPTIMIZERS, ExchangingOptimizer, Parameters, check_rates
from laconic.transports.world import World


@OPTIMIZERS.register("dion")
class Dion(ExchangingOptimizer):
    """Orthonormalised momentum of rank r for matrices; vectors and small matrices move by the sign of their momentum.

    For a matrix X of m × n, on worker i:  Bᵢ = Mᵢ + Gᵢ;  P = orth(mean(BᵢQ));  R = mean(BᵢᵀP);
    Mᵢ ← Bᵢ − (1−μ)PRᵀ;  Q ← columns of R, each divided by its length;
    X ← X − lr·(√(m/n)·PQᵀ + weight_decay·X).
    For other parameters, with ḡ = mean(gᵢ) exact:  c = sign(β₁m + (1−β₁)ḡ);  m ← β₂m + (1−β₂)ḡ;
    x ← x − lr·vector_rate·c (Lion).

    Cost: two all-reduces of r·(m + n) float32 values in all for each matrix, and one of all other parameters.

    Args:
        matrix_rank: r, at most the smaller side of a matrix.
        momentum: μ.
        vector_rate: by what the learning rate of other parameters is multiplied.

    Source: Ahn et al., Dion: Distributed Orthonormalized Updates, 2025, Alg. 1 and 2.
    Differs: Q begins as an orthonormal basis drawn by a fixed seed, the same on all workers; matrices with a side below
    `matrix_rank` + 1 move as vectors.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 0.01,
        matrix_rank: int = 16,
        momentum: float = 0.95,
        weight_decay: float = 0.0,
        betas: tuple[float, float] = (0.95, 0.98),
        vector_rate: float = 0.1,
        world: World | None = None,
    ) -> None:
        check_rates(lr, (momentum, *betas), weight_decay=weight_decay, vector_rate=vector_rate)
        if matrix_rank < 1:
            raise BadInput(f"matrix_rank is at least 1, got {matrix_rank}")
        self._rank = matrix_rank
        chosen = {
            "lr": lr, "matrix_rank": matrix_rank, "momentum": momentum, "weight_decay": weight_decay, "betas": betas,
            "vector_rate": vector_rate,
        }  # fmt: skip
        super().__init__(params, chosen, world=world)

    def _update(self, gradients: Tensor) -> None:
        vectors = [g.reshape(-1) for _, p, (g,) in self.pieces(gradients) if not self._is_matrix(p)]
        whole = self._mean(torch.cat(vectors)) if vectors else gradients[:0]
        mean = iter(torch.split(whole, [vector.numel() for vector in vectors]))
        for number, (group, parameter, (g,)) in enumerate(self.pieces(gradients)):
            if self._is_matrix(parameter):
                self._move_matrix(group, parameter, g.reshape(g.shape[0], -1), number)
            else:
                self._move_vector(group, parameter, next(mean).view_as(parameter))

    def _is_matrix(self, parameter: Tensor) -> bool:
        return parameter.dim() > 1 and min(parameter.shape[0], math.prod(parameter.shape[1:])) > self._rank

    def _move_matrix(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor, number: int) -> None:
        rows, columns = gradient.shape
        momentum = self._kept(parameter, "momentum").view(rows, columns)
        q = self.state[parameter].get("q")
        if q is None:
            drawn = torch.randn(columns, self._rank, generator=torch.Generator().manual_seed(number))
            q = torch.linalg.qr(drawn).Q.to(gradient.device)
        momentum += gradient
        p = torch.linalg.qr(self._mean(momentum @ q)).Q
        r = self._mean(momentum.T @ p)
        momentum -= (1 - group["momentum"]) * (p @ r.T)
        q = r / r.norm(dim=0).clamp_min(1e-12)
        self.state[parameter]["q"] = q
        by = (math.sqrt(rows / columns) * (p @ q.T)).view_as(parameter)
        self.move(parameter, by, group["weight_decay"], group["lr"])

    def _move_vector(self, group: dict[str, Any], parameter: Tensor, gradient: Tensor) -> None:
        first, second = group["betas"]
        momentum = self._kept(parameter, "momentum")
        by = momentum.mul(first).add_(gradient, alpha=1 - first).sign_()
        momentum.mul_(second).add_(gradient, alpha=1 - second)
        self.move(parameter, by, 0.0, group["lr"] * group["vector_rate"])

    def _mean(self, values: Tensor) -> Tensor:
        if self.alone:
            return values
        contiguous = values.contiguous()
        return all_reduce(contiguous, "mean", algorithm="direct", group=self.world)
