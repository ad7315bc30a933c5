"""1-bit LAMB: LAMB until its second moments have settled; then momentum at one bit, with rates that still adapt."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import BadInput
from laconic.optim.base import OPTIMIZERS, ExchangingOptimizer, Parameters, check_rates
from laconic.transports.world import World


@OPTIMIZERS.register("onebit_lamb")
class OneBitLamb(ExchangingOptimizer):
    """LAMB whose second moments are frozen after `freeze_step` steps; from then on momentum is sent, at one bit.

    Before, for each parameter x:  ḡ = mean(gᵢ), exact;  m ← β₁m + (1−β₁)ḡ;  v ← β₂v + (1−β₂)ḡ²;
    u = m/(√v + ε) + weight_decay·x;  c = ‖x‖/‖u‖ within `coefficients`;  c̄ ← β₃c̄ + (1−β₃)c;  x ← x − lr·c·u.
    After:  mᵢ = β₁m + (1−β₁)gᵢ, times s, so that all parameters share one size;  m' ← mean(C(s·mᵢ))/s, with error
    feedback on both legs;  ĝ = (m' − β₁m)/(1−β₁);  w ← β₂w + (1−β₂)ĝ², from w = v;  v stays;
    r = max (√v + ε)/(√w + ε), within `factors` and within 1 ± `factor_change` of the last r;
    x ← x − lr·r·c̄·(m'/(√v + ε) + weight_decay·x).
    With weight decay, r counts only as far as m' has a part in the update:
    r ← p·r + 1 − p, p = min(1, ‖m'/(√v + ε)‖/‖u‖). Where v is 0 when it freezes, m stays 0, as in `OneBitAdam`.

    Cost: of an all-reduce of float32 before, and of one bit a value and a scale after `freeze_step`.

    Args:
        freeze_step: steps of plain LAMB; 15 to 25 % of the training.
        coefficients: the least and the largest c.
        coefficient_beta: β₃.
        factors: the least and the largest r.
        factor_change: by how much r changes in a step, at most.
        codec: what momentum is sent through after `freeze_step`.

    Source: Li et al., 1-bit LAMB, HiPC 2022, Alg. 1; p and its place are DeepSpeed's.
    Differs: biases and small parameters stay exact; s is the mean over parameters of the root mean square of m when
    it freezes, over the parameter's own, and 1 where that is 0; no bias correction, as in the paper.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 1000,
        coefficients: tuple[float, float] = (0.01, 10.0),
        coefficient_beta: float = 0.9,
        factors: tuple[float, float] = (0.5, 4.0),
        factor_change: float = 0.1,
        codec: str | Codec = "onebit",
        world: World | None = None,
    ) -> None:
        check_rates(lr, (*betas, coefficient_beta), eps=eps, weight_decay=weight_decay, factor_change=factor_change)
        if freeze_step < 1:
            raise BadInput(f"freeze_step is at least 1, for second moments come of gradients, got {freeze_step}")
        for name, (least, most) in {"coefficients": coefficients, "factors": factors}.items():
            if not 0 < least <= most:
                raise BadInput(f"{name} are the least and the largest, above 0, got {(least, most)}")
        self.freeze_step = freeze_step
        chosen = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step,
            "coefficients": coefficients, "coefficient_beta": coefficient_beta, "factors": factors,
            "factor_change": factor_change,
        }  # fmt: skip
        super().__init__(params, chosen, codec=codec, world=world)

    def _update(self, gradients: Tensor) -> None:
        frozen = self.param_groups[0]["step"] >= self.freeze_step
        if not frozen:
            self.mean(gradients)
        before = self.flat("exp_avg")
        momentum = before.clone()
        for group, _, (m, g) in self.pieces(momentum, gradients):
            m.mul_(group["betas"][0]).add_(g, alpha=1 - group["betas"][0])
        if frozen:
            self._exchange(momentum, before)
        for group, parameter, (m, was, g) in self.pieces(momentum, before, gradients):
            if frozen:
                m.masked_fill_(self._kept(parameter, "exp_avg_sq") == 0, 0.0)
                self._move_frozen(group, parameter, m, was)
            else:
                self._move_warming(group, parameter, m, g)
        self.keep("exp_avg", momentum)

    def _exchange(self, momentum: Tensor, before: Tensor) -> None:
        """The mean of the momenta, which travel in one size; the scales are made once, of what all workers share."""
        if "scale" not in self.state[self._parameters[0]]:
            sizes = [m.square().mean().sqrt() for _, _, (m,) in self.pieces(before)]
            mean = torch.stack(sizes).mean()
            for parameter, size in zip(self._parameters, sizes, strict=True):
                self.state[parameter]["scale"] = torch.where(size * mean > 0, mean / size, torch.ones_like(mean))
        for _, parameter, (m,) in self.pieces(momentum):
            m.mul_(self.state[parameter]["scale"])
        self.mean(momentum, coded=True)
        for _, parameter, (m,) in self.pieces(momentum):
            m.div_(self.state[parameter]["scale"])

    def _move_warming(self, group: dict[str, Any], parameter: Tensor, m: Tensor, g: Tensor) -> None:
        v = self._kept(parameter, "exp_avg_sq")
        v.mul_(group["betas"][1]).addcmul_(g, g, value=1 - group["betas"][1])
        value = parameter.detach().float()
        by = m / (v.sqrt() + group["eps"]) + group["weight_decay"] * value
        size, length = float(value.norm()), float(by.norm())
        least, most = group["coefficients"]
        coefficient = min(most, max(least, size / length)) if size > 0 and length > 0 else 1.0
        state, beta = self.state[parameter], group["coefficient_beta"]
        mean = float(state["coefficient"]) if "coefficient" in state else coefficient
        state["coefficient"] = torch.tensor(beta * mean + (1 - beta) * coefficient)
        self.move(parameter, by, 0.0, group["lr"] * coefficient)

    def _move_frozen(self, group: dict[str, Any], parameter: Tensor, m: Tensor, was: Tensor) -> None:
        (first, second), eps, state = group["betas"], group["eps"], self.state[parameter]
        v = state["exp_avg_sq"]
        w = state["exp_avg_sq_now"] if "exp_avg_sq_now" in state else v.clone()
        made = (m - first * was) / (1 - first)
        state["exp_avg_sq_now"] = w.mul_(second).addcmul_(made, made, value=1 - second)
        step = m / (v.sqrt() + eps)
        by = step + group["weight_decay"] * parameter.detach().float()
        factor = float(((v.sqrt() + eps) / (w.sqrt() + eps)).max()) if v.numel() else 1.0
        if group["weight_decay"] > 0 and (length := float(by.norm())) > 0:
            share = min(1.0, float(step.norm()) / length)
            factor = share * factor + 1 - share
        last = float(state["factor"]) if "factor" in state else 1.0
        for least, most in (
            group["factors"],
            (last * (1 - group["factor_change"]), last * (1 + group["factor_change"])),
        ):
            factor = min(most, max(least, factor))
        state["factor"] = torch.tensor(factor)
        rate = group["lr"] * factor * float(state["coefficient"])
        self.move(parameter, by, 0.0, rate if math.isfinite(rate) else 0.0)
