"""`native`: torch's own convolution, the measure of all others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.operators.method import MethodCost, direct_cost, register
from laconic.operators.shape import Convolution


@register("native")
@dataclass(frozen=True)
class Native:
    """What `torch.nn.functional.conv2d` calls: oneDNN's direct method for most shapes, on tensors in torch's order.

    Cost: W = N·K·H'W'·C·k², depth ⌈log₂C⌉ + Σ⌈log₂k⌉; the workspace is torch's own affair and counted as none.
    """

    name: ClassVar[str]

    def refuses(self, conv: Convolution) -> str:
        return ""

    def cost(self, conv: Convolution) -> MethodCost:
        return direct_cost(conv, 0)

    def prepare(self, weight: Tensor, conv: Convolution) -> Tensor:
        return weight

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        return convolution(x, prepared, bias, conv)

    def weight_gradient(self, x: Tensor, grad: Tensor, conv: Convolution) -> Tensor:
        return gradients(x, x.new_empty(1).expand(conv.weight_shape), grad, conv, (False, True))[1]


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, conv: Convolution) -> Tensor:
    """torch's forward pass."""
    zero = (0,) * len(conv.size)
    return torch.convolution(x, weight, bias, conv.stride, conv.padding, conv.dilation, False, zero, conv.groups)


def gradients(x: Tensor, weight: Tensor, grad: Tensor, conv: Convolution, wanted: tuple[bool, bool]) -> tuple[Any, Any]:
    """torch's gradients of input and weights; None where it is not wanted."""
    zero = (0,) * len(conv.size)
    found = torch.ops.aten.convolution_backward(grad, x, weight, None, conv.stride, conv.padding, conv.dilation, False,
                                                zero, conv.groups, (*wanted, False))  # fmt: skip
    return found[0], found[1]
