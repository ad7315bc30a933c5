"""1-bit Adam: Adam until its second moments have settled; then momentum at one bit a value."""

from __future__ import annotations

from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import BadInput
from laconic.optim.base import OPTIMIZERS, ExchangingOptimizer, Parameters, check_rates
from laconic.transports.world import World


@OPTIMIZERS.register("onebit_adam")
class OneBitAdam(ExchangingOptimizer):
    """Adam whose second moments are frozen after `freeze_step` steps; from then on momentum is sent, at one bit.

    Before:  ḡ = mean(gᵢ), exact;  m ← β₁m + (1−β₁)ḡ;  v ← β₂v + (1−β₂)ḡ².
    After:   mᵢ = β₁m + (1−β₁)gᵢ;  m ← mean(C(mᵢ)), with error feedback on both legs;  v stays.
    Always:  x ← x − lr·(m/(√v + ε) + weight_decay·x).
    Where v is 0 when it freezes, as in rows of an embedding that nobody has used, m stays 0: one bit has no zero, and
    what a codec puts there would be divided by ε alone. Warm up for long enough that all that matters has had a
    gradient.

    Cost: of an all-reduce of float32 before, and of one bit a value and a scale after `freeze_step`.

    Args:
        freeze_step: steps of plain Adam; 15 to 25 % of the training, when v hardly changes any more.
        codec: what momentum is sent through after that.

    Source: Tang et al., 1-bit Adam, ICML 2021, Alg. 1.
    Differs: biases and small parameters stay exact; values without second moments stay, which DeepSpeed leaves to an
    `exp_avg_mask`; no bias correction, as in the paper.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        freeze_step: int = 1000,
        codec: str | Codec = "onebit",
        world: World | None = None,
    ) -> None:
        check_rates(lr, betas, eps=eps, weight_decay=weight_decay)
        if freeze_step < 1:
            raise BadInput(f"freeze_step is at least 1, for second moments come of gradients, got {freeze_step}")
        self.freeze_step = freeze_step
        chosen = {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay, "freeze_step": freeze_step}
        super().__init__(params, chosen, codec=codec, world=world)

    def _update(self, gradients: Tensor) -> None:
        frozen = self.param_groups[0]["step"] >= self.freeze_step
        if not frozen:
            self.mean(gradients)
        momentum = self.flat("exp_avg")
        for group, _, (m, g) in self.pieces(momentum, gradients):
            m.mul_(group["betas"][0]).add_(g, alpha=1 - group["betas"][0])
        if frozen:
            self.mean(momentum, coded=True)
        for group, parameter, (m, g) in self.pieces(momentum, gradients):
            v = self._kept(parameter, "exp_avg_sq")
            if frozen:
                m.masked_fill_(v == 0, 0.0)
            else:
                v.mul_(group["betas"][1]).addcmul_(g, g, value=1 - group["betas"][1])
            self.move(parameter, m / (v.sqrt() + group["eps"]), group["weight_decay"], group["lr"])
        self.keep("exp_avg", momentum)
