"""`im2col`: a convolution as a matrix product, with the patches written out or not.

Callers: the registry. Written out, every input value is copied once for every tap of the kernel that meets it: 9 times
for VGG's 3×3, not at all for 1×1. Implicitly, each tap is a matrix product of its own on a shifted view of the padded
input, and the products add up in place; nothing is amplified, but the output is passed over once a tap.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.errors import BadInput
from laconic.operators.method import MethodCost, direct_cost, register
from laconic.operators.scratch import fresh
from laconic.operators.shape import Convolution


@register("im2col")
@dataclass(frozen=True)
class Im2col:
    """Y = W · X̃, X̃ (C·k² × pixels) the patches, some at a time, so that the product reads them from cache.

    Source: Chellapilla et al., High Performance Convolutional Neural Networks for Document Processing, 2006.
    Implicitly: Vasudevan et al., Parallel Multi Channel Convolution Using General Matrix Multiplication, 2017 (kn2row).

    Args:
        implicit: no patches; one product a tap.
        block_nbytes: of patches written out before they are multiplied.
    """

    implicit: bool = False
    block_nbytes: int = 1 << 21  # on 1 MiB of L2 and 32 MiB of L3, 0.5 to 4 MiB measure alike
    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = ("im2col", "im2col(true)")

    def __post_init__(self) -> None:
        if self.block_nbytes < 1:
            raise BadInput("im2col: block_nbytes is 1 or more")

    def refuses(self, conv: Convolution) -> str:
        return ""

    def cost(self, conv: Convolution) -> MethodCost:
        flat = conv.planar()
        if _pointwise(flat):
            return direct_cost(conv, 0)
        padded = flat.in_channels * math.prod(n + 2 * p for n, p in zip(flat.size, flat.padding, strict=True))
        block = 0 if self.implicit else self._rows(flat) * flat.output[1] * conv.terms
        return direct_cost(conv, conv.item_nbytes * (padded + block))

    def prepare(self, weight: Tensor, conv: Convolution) -> Tensor:
        shape = (conv.groups, conv.out_channels // conv.groups, conv.in_channels // conv.groups, math.prod(conv.kernel))
        matrices = weight.detach().reshape(shape)
        if self.implicit:
            return matrices.permute(3, 0, 1, 2).contiguous()  # taps, groups, K, C
        return matrices.reshape(*shape[:2], -1)

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        flat = conv.planar()
        y = fresh((flat.batch, flat.groups, flat.out_channels // flat.groups, *flat.output), x.dtype)
        x = _padded(x.reshape(flat.input_shape), flat)
        for image in range(flat.batch):
            if self.implicit:
                self._taps(x[image], prepared, y[image], flat)
            else:
                for lo, hi in self._blocks(flat):
                    patches = _patches(x[image], flat, lo, hi).view(flat.groups, conv.terms, -1)
                    _into(y[image, :, :, lo:hi], prepared, patches)
        if bias is not None:
            y += bias.view(flat.groups, -1, 1, 1)
        return y.reshape(conv.output_shape)

    def weight_gradient(self, x: Tensor, grad: Tensor, conv: Convolution) -> Tensor:
        """∇W = Σ ∇Y · X̃ᵀ, block by block."""
        flat = conv.planar()
        total = x.new_zeros((flat.groups, flat.out_channels // flat.groups, conv.terms))
        x = _padded(x.reshape(flat.input_shape), flat)
        grad = grad.reshape(flat.batch, flat.groups, -1, *flat.output)
        for image in range(flat.batch):
            for lo, hi in self._blocks(flat):
                patches = _patches(x[image], flat, lo, hi).reshape(flat.groups, conv.terms, -1)
                total.baddbmm_(grad[image, :, :, lo:hi].flatten(2), patches.transpose(1, 2))
        return total.reshape(conv.weight_shape)

    def _rows(self, flat: Convolution) -> int:
        """Output rows whose patches fit a block, one at least; all where the image is its own patches."""
        if _pointwise(flat):
            return flat.output[0]
        row = flat.item_nbytes * flat.output[1] * flat.terms * flat.groups
        return max(1, min(flat.output[0], self.block_nbytes // row))

    def _blocks(self, flat: Convolution) -> Iterator[tuple[int, int]]:
        rows = self._rows(flat)
        for lo in range(0, flat.output[0], rows):
            yield lo, min(lo + rows, flat.output[0])

    def _taps(self, x: Tensor, taps: Tensor, y: Tensor, flat: Convolution) -> None:
        """y += W_tap · x shifted by the tap, for each tap. A pixel's row is one batch entry of the product."""
        views = _windows(x, flat, 0, flat.output[0]).unflatten(0, (flat.groups, -1))  # g, C, ky, kx, H', W'
        for tap, (i, j) in enumerate((i, j) for i in range(flat.kernel[0]) for j in range(flat.kernel[1])):
            seen = views[:, :, i, j].flatten(2)  # a view where the output is as wide as the padded input, else a copy
            product = torch.bmm(taps[tap], seen).view_as(y)
            y.copy_(product) if tap == 0 else y.add_(product)


def _pointwise(flat: Convolution) -> bool:
    """Kernels of one tap at every pixel: nothing is padded, skipped or written out."""
    return (flat.kernel, flat.stride, flat.padding) == ((1, 1), (1, 1), (0, 0))


def _padded(x: Tensor, flat: Convolution) -> Tensor:
    py, px = flat.padding
    return F.pad(x, (px, px, py, py)) if py or px else x


def _windows(x: Tensor, flat: Convolution, lo: int, hi: int) -> Tensor:
    """The taps each output pixel of rows lo … hi meets, as a view: C, k_y, k_x, rows, W'."""
    c, y, x_ = x.stride()
    (sy, sx), (dy, dx) = flat.stride, flat.dilation
    shape = (flat.in_channels, *flat.kernel, hi - lo, flat.output[1])
    return x[:, lo * sy :].as_strided(shape, (c, dy * y, dx * x_, sy * y, sx * x_), x.storage_offset() + lo * sy * y)


def _patches(x: Tensor, flat: Convolution, lo: int, hi: int) -> Tensor:
    """The same in one block of memory: a copy, unless the image is its own patches."""
    return _windows(x, flat, lo, hi).contiguous()


def _into(y: Tensor, weights: Tensor, patches: Tensor) -> None:
    """y = weights · patches, straight into y when its rows are one block of memory."""
    flat = y.flatten(2)
    if flat.data_ptr() == y.data_ptr():
        torch.bmm(weights, patches, out=flat)
    else:
        y.copy_(torch.bmm(weights, patches).view_as(y))
