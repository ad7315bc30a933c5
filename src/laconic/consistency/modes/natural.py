"""NG-SGD: model averaging whose workers precondition their gradients by a Fisher matrix of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from laconic.consistency.base import Setup, register
from laconic.consistency.blocks import BlockAgreement, BlockMode
from laconic.errors import BadInput
from laconic.storage.form import check_like

MOST_ROWS = 256  # of one batch, that are looked at


class FisherFactor:
    """A running mean of xxᵀ over the rows x that come, F ← (1−η)F + η·mean(xxᵀ), cut to rank r after every batch.

    F ≈ U diag(λ) Uᵀ + ρI with r columns in U, so keeping and applying it costs r·D, not D². What the cut leaves out is
    spread over all directions, so that the trace is right.

    The inverse is that of F + α·tr(F)/D·I (α: `smoothing`), between natural (0) and plain gradient (large); D is
    `dimension`, the length of a row, r is `rank` and η is `forget`.

    Source: Povey, Zhang and Khudanpur, Parallel Training of DNNs with Natural Gradient and Parameter Averaging, ICLR
    2015 workshop, section 4 and appendix B.
    Differs: the rank-r part is found from the batch's own Gram matrix each time, not by the paper's approximate update.
    """

    def __init__(
        self, dimension: int, rank: int, forget: float, smoothing: float, device: torch.device | None = None
    ) -> None:
        self.rank = min(rank, dimension)
        self.forget, self.smoothing = forget, smoothing
        self.u = torch.zeros(dimension, self.rank, device=device)
        self.scale = torch.zeros(self.rank, device=device)  # λ
        self.rest = 0.0  # ρ
        self.batches = 0
        self._ridge = 0.0  # ρ + α·tr(F)/D, which every step asks for, and only `update` changes

    def update(self, rows: Tensor) -> None:
        """Add the rows (n, D) of one batch; rows with NaN or infinity are skipped."""
        rows = rows[:MOST_ROWS]
        if len(rows) == 0 or not bool(torch.isfinite(rows).all()):
            return
        new = self.forget if self.batches else 1.0
        stacked = torch.cat([((1 - new) * self.scale).sqrt()[:, None] * self.u.T, (new / len(rows)) ** 0.5 * rows])
        values, vectors = torch.linalg.eigh(stacked @ stacked.T)
        top = values[-self.rank :].clamp_min(0.0)
        self.rest = (1 - new) * self.rest + float((values.sum() - top.sum()).clamp_min(0.0)) / rows.shape[1]
        count = len(top)
        self.scale.zero_()
        self.u.zero_()
        self.scale[:count] = top
        self.u[:, :count] = stacked.T @ vectors[:, -self.rank :] / top.clamp_min(1e-30).sqrt()
        self.u[:, :count] *= (top > 1e-6 * top.max()).float()  # directions that were not seen
        self.scale[:count] *= (top > 1e-6 * top.max()).float()
        self.batches += 1
        self._set_ridge()

    def _set_ridge(self) -> None:
        dimension = self.u.shape[0]
        trace = float(self.scale.sum()) + self.rest * dimension
        self._ridge = self.rest + self.smoothing * trace / dimension

    def apply(self, rows: Tensor) -> Tensor:
        """rows·(F + α·tr(F)/D·I)⁻¹, times the identity's share of F, which the caller's scaling takes out."""
        if self.batches == 0 or self._ridge <= 0:
            return rows
        return rows - ((rows @ self.u) * (self.scale / (self.scale + self._ridge))) @ self.u.T

    def state_dict(self) -> dict[str, Tensor | float | int]:
        return {"u": self.u.clone(), "scale": self.scale.clone(), "rest": self.rest, "batches": self.batches}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.u, self.scale = state["u"].to(self.u, copy=True), state["scale"].to(self.scale, copy=True)
        self.rest, self.batches = float(state["rest"]), int(state["batches"])
        self._set_ridge()


@register("natural")
@dataclass(frozen=True)
class NaturalMode(BlockMode):
    """As `local`, and each worker makes the gradients of its nn.Linear layers natural before it steps.

    For a layer with inputs a (1 appended for the bias) and gradients d of its outputs, the Fisher matrix is taken to be
    the Kronecker product of A = mean(aaᵀ) and D = mean(ddᵀ), each kept to `rank` and smoothed: G ← D⁻¹ G A⁻¹, scaled to
    the length that G had. Other parameters keep their gradients. Statistics are each worker's own, taken from every
    `every`-th batch; only weights are averaged, every `period` steps.

    Cost: bytes as `local`. A step does about 4·rank·(inputs + outputs) multiplications a row of the weights more, and
    every `every`-th decomposes two matrices of (rank + batch)².

    Args:
        period: steps between two means.
        rank: of each Fisher factor.
        smoothing: α: factors are F + α·tr(F)/D·I.
        forget: the share of the newest batch in the factors.
        every: batches between two that update the factors.

    >>> str(NaturalMode(16))
    'natural(16)'

    Source: Povey, Zhang and Khudanpur, Parallel Training of DNNs with Natural Gradient and Parameter Averaging, ICLR
    2015 workshop.
    Differs: the layer's whole gradient keeps its length, not every row's; with one worker it is the plain optimiser, as
    all modes are.
    """

    period: int = 8
    rank: int = 20
    smoothing: float = 4.0
    forget: float = 0.1
    every: int = 4

    summary: ClassVar[str] = "as local, with gradients made natural by each worker"
    source: ClassVar[str] = "Povey, Zhang and Khudanpur, NG-SGD, ICLR 2015 workshop"
    examples: ClassVar[tuple[str, ...]] = ("natural(8)",)

    def __post_init__(self) -> None:
        self.check_block()
        if self.rank < 1 or self.every < 1 or not 0 < self.forget <= 1 or not self.smoothing > 0:
            raise BadInput(
                "natural: rank and every are at least 1, forget is above 0 and at most 1, smoothing above 0; got "
                f"rank={self.rank}, every={self.every}, forget={self.forget}, smoothing={self.smoothing}"
            )

    def install(self, setup: Setup) -> NaturalAgreement:
        return NaturalAgreement(self, setup)


class NaturalAgreement(BlockAgreement):
    """Natural at work."""

    def __init__(self, mode: NaturalMode, setup: Setup) -> None:
        self.layers = {
            name: _Layer(module, mode)
            for name, module in setup.model.named_modules()
            if isinstance(module, nn.Linear) and module.weight.requires_grad
        }
        if not self.layers:
            raise BadInput("natural preconditions nn.Linear layers, and the model has none to train; use local")
        super().__init__(mode, setup)
        self.natural = mode
        for layer in self.layers.values():
            self.resources.callback(layer.handle.remove)
        self._watch(not self.alone)

    def before_step(self) -> None:
        if not self.alone:
            for layer in self.layers.values():
                layer.make_natural()
            self._watch((self.step + 1) % self.natural.every == 0)
        super().before_step()

    def _watch(self, watching: bool) -> None:
        for layer in self.layers.values():
            layer.watching = watching

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "fisher": {name: layer.state_dict() for name, layer in self.layers.items()}}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        layers = {name: layer.state_dict() for name, layer in self.layers.items()}
        check_like(state, {"fisher": layers}, "the state of natural")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        for name, layer in self.layers.items():
            layer.load_state_dict(state["fisher"][name])
        self._watch(not self.alone and self.step % self.natural.every == 0)


class _Layer:
    """A Linear layer and the two factors of its Fisher matrix."""

    def __init__(self, module: nn.Linear, mode: NaturalMode) -> None:
        self.module = module
        self.watching = False
        inputs = module.in_features + (module.bias is not None)
        device = module.weight.device
        self.inputs = FisherFactor(inputs, mode.rank, mode.forget, mode.smoothing, device)
        self.outputs = FisherFactor(module.out_features, mode.rank, mode.forget, mode.smoothing, device)
        self.handle = module.register_forward_hook(self._look)

    def _look(self, module: nn.Module, given: tuple[Tensor, ...], output: Tensor) -> None:
        """Record this batch's inputs, and the gradients of its outputs once they exist."""
        if not self.watching or not output.requires_grad:
            return
        rows = given[0].detach().reshape(-1, self.module.in_features).float()

        def take(gradient: Tensor) -> None:
            ones = rows.new_ones(len(rows), 1)
            self.inputs.update(torch.cat([rows, ones], 1) if self._has_bias else rows)
            self.outputs.update(gradient.reshape(-1, self.module.out_features).float())

        output.register_hook(take)

    @property
    def _has_bias(self) -> bool:
        return self.module.bias is not None

    def make_natural(self) -> None:
        """G ← D⁻¹ G A⁻¹, as long as G was."""
        weight = self.module.weight.grad
        bias = self.module.bias.grad if self._has_bias else None
        if weight is None or (self._has_bias and bias is None):
            return
        plain = (weight if bias is None else torch.cat([weight, bias[:, None]], 1)).float()
        natural = self.outputs.apply(self.inputs.apply(plain).T).T
        natural = natural * (plain.norm() / natural.norm().clamp_min(torch.finfo(torch.float32).tiny))
        weight.copy_(natural[:, : weight.shape[1]])
        if bias is not None:
            bias.copy_(natural[:, -1])

    def state_dict(self) -> dict[str, Any]:
        return {"inputs": self.inputs.state_dict(), "outputs": self.outputs.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.inputs.load_state_dict(state["inputs"])
        self.outputs.load_state_dict(state["outputs"])
