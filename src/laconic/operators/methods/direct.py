"""`direct`: the sum as it stands, in a compiled loop over lines, four output channels at a time.

Callers: the registry, the ladder. Nothing is amplified: a line of input is read from cache and added, scaled, to the
lines of four output channels, which stay in the first-level cache until all taps of all channels are in them. Kernels
of 1×1 are a product of matrices on the image as it lies, with its sums in registers.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch.nn.functional as F
from torch import Tensor

from laconic.kernels import njit
from laconic.operators.method import MethodCost, direct_cost, register
from laconic.operators.products import multiply_lines, row
from laconic.operators.scratch import fresh
from laconic.operators.shape import Convolution
from laconic.operators.vectors import lanes

Array = np.ndarray[Any, np.dtype[Any]]


@register("direct")
@dataclass(frozen=True)
class Direct:
    """y[k, line] += w[k, c, i, j] · x[c, line shifted by (i, j)], vectorised along the line.

    Cost: the work of the definition; the workspace is the padded input, or of 1×1 what a stride leaves of it.
    """

    name: ClassVar[str]

    def refuses(self, conv: Convolution) -> str:
        return ""

    def cost(self, conv: Convolution) -> MethodCost:
        flat = conv.planar()
        if _pointwise(flat):
            pixels = 0 if max(flat.stride) == 1 else conv.batch * conv.in_channels * math.prod(flat.output)
            rows = conv.out_channels * row(conv.in_channels // conv.groups, conv.dtype)
            return direct_cost(conv, (pixels + rows) * conv.item_nbytes)
        padded = math.prod(n + 2 * p for n, p in zip(flat.size, flat.padding, strict=True))
        return direct_cost(conv, conv.batch * conv.in_channels * padded * conv.item_nbytes)

    def prepare(self, weight: Tensor, conv: Convolution) -> Tensor:
        flat = conv.planar()
        if _pointwise(flat):
            found = weight.new_zeros(conv.groups, conv.out_channels // conv.groups, row(weight.shape[1], conv.dtype))
            found[:, :, : weight.shape[1]] = weight.detach().reshape(*found.shape[:2], -1)
            return found
        return weight.detach().reshape(flat.weight_shape).contiguous()

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        flat = conv.planar()
        y, x = fresh(flat.output_shape, x.dtype), x.detach().reshape(flat.input_shape)
        if _pointwise(flat):
            _products(x, prepared, y, flat)
            if bias is not None:
                y += bias.detach().view(-1, 1, 1)
            return y.reshape(conv.output_shape)
        py, px = flat.padding
        x = F.pad(x, (px, px, py, py)).contiguous()
        start = x.new_zeros(flat.out_channels) if bias is None else bias.detach()
        (sy, sx), (dy, dx) = flat.stride, flat.dilation
        _lines(x.numpy(), prepared.numpy(), start.numpy(), sy, sx, dy, dx, flat.groups, y.numpy())
        return y.reshape(conv.output_shape)


def _pointwise(flat: Convolution) -> bool:
    """Kernels of one tap and enough pixels for a vector of them."""
    return flat.kernel == (1, 1) and flat.padding == (0, 0) and math.prod(flat.output) >= lanes(flat.dtype)


def _products(x: Tensor, weights: Tensor, y: Tensor, flat: Convolution) -> None:
    """y = W · x for each sample and group."""
    x = x[:, :, :: flat.stride[0], :: flat.stride[1]].contiguous()
    of_x, of_y = (t.view(flat.batch, flat.groups, t.shape[1] // flat.groups, -1).numpy() for t in (x, y))
    product, matrices = multiply_lines(flat.dtype), weights.numpy()
    for image in range(flat.batch):
        for group in range(flat.groups):
            product(matrices[group], of_x[image, group], of_y[image, group])


@njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
def _lines(x: Array, w: Array, bias: Array, sy: int, sx: int, dy: int, dx: int, groups: int, y: Array) -> None:
    """y = bias + Σ w · x; x is padded already."""
    of_group, channels = y.shape[1] // groups, w.shape[1]
    width, step = np.uint64(y.shape[3]), np.uint64(sx)
    lines = np.empty((4, y.shape[3]), y.dtype)
    a0, a1, a2, a3 = lines[0], lines[1], lines[2], lines[3]
    for n in range(y.shape[0]):
        for k in range(0, y.shape[1], 1):
            group = k // of_group
            if (k - group * of_group) % 4:
                continue  # done with the first of its four
            four = min(4, (group + 1) * of_group - k)
            k1, k2, k3 = k + min(1, four - 1), k + min(2, four - 1), k + min(3, four - 1)
            for oy in range(y.shape[2]):
                for at in range(width):
                    a0[at], a1[at], a2[at], a3[at] = bias[k], bias[k1], bias[k2], bias[k3]
                for c in range(channels):
                    for i in range(w.shape[2]):
                        line = x[n, group * channels + c, oy * sy + i * dy]
                        for j in range(w.shape[3]):
                            w0, w1, w2, w3 = w[k, c, i, j], w[k1, c, i, j], w[k2, c, i, j], w[k3, c, i, j]
                            seen = line[j * dx :]
                            for at in range(width):
                                v = seen[at * step]
                                a0[at] += w0 * v
                                a1[at] += w1 * v
                                a2[at] += w2 * v
                                a3[at] += w3 * v
                for at in range(four):
                    y[n, k + at, oy] = lines[at]
