"""DeMo: momentum stays with each worker, and only its fast components are sent."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.collectives import all_gather
from laconic.optim.base import OPTIMIZERS, ExchangingOptimizer, Parameters, check_rates
from laconic.transports.world import World


@OPTIMIZERS.register("demo")
class DeMo(ExchangingOptimizer):
    """Decoupled momentum: each worker sends the largest components of its momentum's cosine transform.

    mᵢ ← βmᵢ + gᵢ;  qᵢ = top-k of DCT(mᵢ) in chunks of `chunk`;  mᵢ ← mᵢ − DCT⁻¹(qᵢ);
    x ← x − lr·(sign(DCT⁻¹(Σᵢ qᵢ)) + weight_decay·x).

    Cost: two all-gathers, of k·(2 + 4) bytes for every `chunk` values of each worker: 0.375 bytes a value with k = 4 in
    chunks of 64, where float32 has 4.

    Args:
        beta: momentum's decay, close to 1.
        chunk: values that are transformed together.
        k: components of each chunk that are sent.

    Source: Peng, Quesnelle and Kingma, DeMo: Decoupled Momentum Optimization, 2024, Alg. 1.
    Differs: chunks are runs of the flat vector of all parameters, not tiles of each matrix; components are summed as
    float32 in the order of ranks, so all workers move by the same bits.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        beta: float = 0.999,
        chunk: int = 64,
        k: int = 4,
        weight_decay: float = 0.0,
        world: World | None = None,
    ) -> None:
        check_rates(lr, (beta,), weight_decay=weight_decay)
        if not 0 < k <= chunk <= 32768:
            raise BadInput(f"DeMo needs 0 < k ≤ chunk ≤ 32768, got k={k} and chunk={chunk}")
        self._chunk, self._k = chunk, k
        self._basis = cosine_basis(chunk)
        chosen = {"lr": lr, "beta": beta, "chunk": chunk, "k": k, "weight_decay": weight_decay}
        super().__init__(params, chosen, world=world)

    def _update(self, gradients: Tensor) -> None:
        momentum = self.flat("momentum")
        for group, _, (m, g) in self.pieces(momentum, gradients):
            m.mul_(group["beta"]).add_(g)
        basis = self._basis.to(momentum.device)
        rows = torch.nn.functional.pad(momentum, (0, -momentum.numel() % self._chunk)).view(-1, self._chunk)
        components = rows @ basis.T
        # Largest first, the first of equals before the others, on every worker and engine alike.
        places = components.abs().sort(dim=1, descending=True, stable=True).indices[:, : self._k]
        values = components.gather(1, places)
        sent = torch.zeros_like(components).scatter_(1, places, values)
        momentum -= (sent @ basis).view(-1)[: momentum.numel()]
        self.keep("momentum", momentum)
        total = self._sum(places.to(torch.int16), values, sent)
        direction = (total @ basis).view(-1)[: momentum.numel()].sign()
        for group, parameter, (by,) in self.pieces(direction):
            self.move(parameter, by, group["weight_decay"], group["lr"])

    def _sum(self, places: Tensor, values: Tensor, own: Tensor) -> Tensor:
        """All workers' components, added in the order of ranks."""
        if self.alone:
            return own
        all_places = all_gather(places.cpu(), group=self.world)
        all_values = all_gather(values.cpu(), group=self.world)
        total = torch.zeros_like(own)
        for each_place, each_value in zip(all_places, all_values, strict=True):
            total.scatter_add_(1, each_place.view_as(places).long().to(own.device), each_value.view_as(values).to(own))
        return total


def cosine_basis(size: int) -> Tensor:
    """The rows of the orthonormal DCT-II: row j is √(2/n)·cos(π(2i+1)j/2n), row 0 scaled by 1/√2.

    >>> torch.allclose(cosine_basis(8) @ cosine_basis(8).T, torch.eye(8), atol=1e-6)
    True
    """
    i = torch.arange(size, dtype=torch.float64)
    rows = torch.cos(math.pi * (2 * i[None, :] + 1) * i[:, None] / (2 * size)) * math.sqrt(2 / size)
    rows[0] /= math.sqrt(2)
    return rows.float()
