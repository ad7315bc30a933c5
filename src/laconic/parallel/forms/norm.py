"""`Norm`: batch normalisation over all ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from laconic.parallel.layer import Context, Layer
from laconic.parallel.moves import Copy, Spread
from laconic.parallel.plan import DividedForm, register


@register("norm")
@dataclass(frozen=True)
class Norm(DividedForm):
    """Batch normalisation by the statistics of all ranks' rows or strips, whose sizes may differ.

    Without it, each rank normalises by what it sees. A rank sends 2C + 1 values to each other rank forward, and as many
    back.

    Source: Chan, Golub, LeVeque 1979 for the merging of means and variances.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
    part: ClassVar[str] = "any"  # it lies between layers that are divided, and lets strips through

    def make(self, name: str, module: nn.Module, context: Context, takes: str, gives: str) -> Layer:
        return WideNorm(name, context, module, takes, gives)


class WideNorm(Layer):
    """y = (x − mean) / √(variance + ε) · weight + bias, over the batch and the pixels of all ranks."""

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def __init__(self, name: str, context: Context, layer: nn.Module, takes: str, gives: str) -> None:
        super().__init__(name, context, layer, takes, gives)
        assert isinstance(layer, _BatchNorm)
        self.eps, self.momentum = layer.eps, layer.momentum
        self.statistics = context.exact(name)
        self.shared = context.exact(f"{name} weights")
        self.hold("weight", layer.weight, {})
        self.hold("bias", layer.bias, {})
        for buffer in ("running_mean", "running_var", "num_batches_tracked"):
            self.register_buffer(buffer, getattr(layer, buffer))

    def forward(self, x: Tensor) -> Tensor:
        shape = [1, -1] + [1] * (x.dim() - 2)
        values = x.float() if x.dtype in (torch.float16, torch.bfloat16) else x  # statistics need more, as in torch
        if self.training or self.running_mean is None or self.running_var is None:
            mean, variance = self._merged(values)
        else:
            mean, variance = self.running_mean, self.running_var
        y = (values - mean.view(shape)) * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            y = y * Copy(self.shared)(self.weigh(self.weight)).view(shape)
        if self.bias is not None:
            y = y + Copy(self.shared)(self.weigh(self.bias)).view(shape)
        return y.to(x.dtype)

    def _merged(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and variance of all ranks' values; the running ones follow in training."""
        dims, count = [dim for dim in range(x.dim()) if dim != 1], x.numel() // x.shape[1]
        if count:
            variance, mean = torch.var_mean(x, dims, correction=0)
        else:  # a rank without rows takes part all the same
            variance = mean = x.sum(dims)
        own = torch.stack([torch.full_like(mean, count), mean, variance])
        counts, means, variances = Spread(self.statistics, 0, [1] * self.size)(own[None]).unbind(1)
        weights = counts / counts.sum(0)
        mean = (weights * means).sum(0)
        variance = (weights * (variances + (means - mean) ** 2)).sum(0)
        if self.training and self.running_mean is not None and self.running_var is not None:
            self._follow(mean.detach(), variance.detach(), counts[:, 0].detach().sum())
        return mean, variance

    def _follow(self, mean: Tensor, variance: Tensor, count: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked += 1
        each = torch.full_like(count, self.momentum or 0)
        factor = 1 / self.num_batches_tracked.to(mean) if self.momentum is None else each
        unbiased = variance * count / (count - 1).clamp(min=1)
        for running, value in ((self.running_mean, mean), (self.running_var, unbiased)):
            running.lerp_(value.to(running.dtype), factor.to(running.dtype))
