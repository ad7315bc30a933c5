"""0/1 Adam: second moments at ever rarer steps, and one bit a value at some steps only."""

from __future__ import annotations

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import BadInput
from laconic.optim.base import OPTIMIZERS, ExchangingOptimizer, Parameters, check_rates
from laconic.transports.world import World


@OPTIMIZERS.register("zero_one_adam")
class ZeroOneAdam(ExchangingOptimizer):
    """Adam that freezes its second moments step by step, and agrees by one bit a value at rarer and rarer steps.

    At every step t, on worker i, with u the sum of what it has moved by since the last agreement:
    mᵢ ← β₁mᵢ + (1−β₁)gᵢ;  xᵢ ← xᵢ − lr·mᵢ/(√v + ε);  uᵢ ← uᵢ + lr·mᵢ.
    At t in T_u:  ū = mean(C(uᵢ));  x = x' − ū/(√v + ε) from where all were at the last agreement, x';
    m = ū/Σlr;  uᵢ ← 0.  At t in T_v, before all else:  v ← β₂v + (1−β₂)·mean(gᵢ)², exact.
    Where v is 0, as in rows of an embedding that nobody has used yet, u and m stay 0: one bit has no zero, and what a
    codec puts there would be divided by ε alone.

    T_v: after every `var_scaler` of its steps the distance to the next doubles, until `var_freeze_step`. T_u: every
    step until then; later the distance doubles every `local_scaler` steps, to `local_most` at the most.

    Cost: one bit a value at steps in T_u, float32 at those in T_v, nothing at others.

    Args:
        var_freeze_step, var_scaler, local_scaler, local_most: as above.

    Source: Lu et al., Maximizing Communication Efficiency for Large-scale Training via 0/1 Adam, ICLR 2023, Alg. 1.
    Differs: v is renewed before it is used, not after; ε is added to √v; weight decay is decoupled, and applied at
    every step; small parameters are exact; values without second moments stay.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        var_freeze_step: int = 1000,
        var_scaler: int = 16,
        local_scaler: int = 1000,
        local_most: int = 16,
        codec: str | Codec = "onebit",
        world: World | None = None,
    ) -> None:
        check_rates(lr, betas, eps=eps, weight_decay=weight_decay)
        if min(var_freeze_step, var_scaler, local_scaler, local_most) < 1:
            raise BadInput("var_freeze_step, var_scaler, local_scaler and local_most are at least 1")
        self.var_freeze_step, self.local_scaler, self.local_most = var_freeze_step, local_scaler, local_most
        self._variance_steps = _variance_steps(var_freeze_step, var_scaler)
        chosen = {
            "lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "var_freeze_step": var_freeze_step,
            "var_scaler": var_scaler, "local_scaler": local_scaler, "local_most": local_most,
        }  # fmt: skip
        super().__init__(params, {**chosen, "since": 0, "lr_sum": 0.0}, codec=codec, world=world)

    def agrees(self, step: int, since: int) -> bool:
        """Whether workers agree at this step, `since` steps after the last agreement."""
        if step < self.var_freeze_step:
            return True
        doublings = min((step - self.var_freeze_step) // self.local_scaler, 30)
        return since + 1 >= min(1 << doublings, self.local_most)

    def _update(self, gradients: Tensor) -> None:
        first = self.param_groups[0]
        step, agrees = first["step"], self.agrees(first["step"], first["since"])
        renews = step in self._variance_steps
        if renews:
            mean = self.mean(gradients.clone())
            for group, parameter, (g,) in self.pieces(mean):
                v = self._kept(parameter, "exp_avg_sq")
                v.mul_(group["betas"][1]).addcmul_(g, g, value=1 - group["betas"][1])
        if not first["since"]:
            self.keep("agreed", self._weights())
        moved = self.flat("moved")
        for group, parameter, (u, g) in self.pieces(moved, gradients):
            m = self._kept(parameter, "exp_avg")
            m.mul_(group["betas"][0]).add_(g, alpha=1 - group["betas"][0])
            u.add_(m, alpha=group["lr"])
        for group in self.param_groups:
            group["since"] += 1
            group["lr_sum"] += group["lr"]
        if agrees:
            self.mean(moved, coded=True)
        for group, parameter, (u,) in self.pieces(moved):
            v = self._kept(parameter, "exp_avg_sq")
            u.masked_fill_(v == 0, 0.0)  # no gradient so far, and one bit has no zero
            scale = v.sqrt() + group["eps"]
            start = self._kept(parameter, "agreed")
            decay = group["weight_decay"] * group["lr_sum"]
            parameter.copy_(start - u / scale - decay * start)
            if agrees and group["lr_sum"]:
                self._kept(parameter, "exp_avg").copy_(u / group["lr_sum"])
        self.keep("moved", moved.zero_() if agrees else moved)
        if agrees:
            for group in self.param_groups:
                group["since"], group["lr_sum"] = 0, 0.0

    def _weights(self) -> Tensor:
        return torch.cat([parameter.detach().reshape(-1).float() for parameter in self._parameters])


def _variance_steps(until: int, scaler: int) -> frozenset[int]:
    """T_v below `until`: `scaler` steps at a distance of 1, as many at 2, at 4, and so on.

    >>> sorted(_variance_steps(20, 3))
    [0, 1, 2, 4, 6, 8, 12, 16]
    """
    found, step, distance = set[int](), 0, 1
    while step < until:
        found.add(step)
        distance = 1 << (len(found) // scaler)
        step += distance
    return frozenset(found)
