"""`prepacked`: oneDNN with its weights reordered once, and with the pixels' channels side by side if that pays.

torch hands oneDNN weights in torch's order, which it reorders in every call, and sends some shapes (depthwise with wide
kernels, most of all) to a slow loop instead.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.operators.method import MethodCost, direct_cost, register
from laconic.operators.shape import Convolution


@register("prepacked")
@dataclass(frozen=True)
class Prepacked:
    """oneDNN's direct method on weights in oneDNN's own order.

    Args:
        channels_last: give oneDNN the input with its channels innermost. The output has that order as well, so that
            a chain of such layers never reorders.
    """

    channels_last: bool = False
    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ("prepacked", "prepacked(true)")

    def refuses(self, conv: Convolution) -> str:
        if not torch.backends.mkldnn.is_available():
            return "this torch has no oneDNN"
        if conv.dtype != "float32":
            return "oneDNN computes in float32"
        # 4096 taps of 8 channels: 20 s where torch takes 0.5; oneDNN falls back on its reference loops.
        return "oneDNN has no quick kernel of more than 64 values a side" if max(conv.kernel) > 64 else ""

    def cost(self, conv: Convolution) -> MethodCost:
        order = math.prod(conv.input_shape) * conv.item_nbytes if self.channels_last else 0
        return direct_cost(conv, math.prod(conv.weight_shape) * conv.item_nbytes + order)

    def prepare(self, weight: Tensor, conv: Convolution) -> Tensor:
        flat = conv.planar()
        plain = weight.detach().reshape(flat.weight_shape).to_mkldnn()
        options = (flat.padding, flat.stride, flat.dilation, flat.groups, flat.input_shape)
        packed: Tensor = torch._C._nn.mkldnn_reorder_conv2d_weight(plain, *options)  # type: ignore[call-arg,arg-type]
        return packed

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        flat = conv.planar()
        x = x.reshape(flat.input_shape)
        x = x.contiguous(memory_format=torch.channels_last if self.channels_last else torch.contiguous_format)
        y: Tensor = torch.ops.mkldnn._convolution_pointwise(x, prepared, bias, flat.padding, flat.stride, flat.dilation,
                                                            flat.groups, "none", [], "")  # fmt: skip
        return y.reshape(conv.output_shape) if flat is not conv else y
