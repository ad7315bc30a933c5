"""`winograd`: minimal filtering, fewer multiplications for small kernels.

Callers: the registry. Three steps over a block of rows of tiles at a time, so that the block stays in cache: transform
the input's tiles, one matrix product for each of the α² positions in a tile, transform the products back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.operators.method import Cost, log2_ceiling, register
from laconic.operators.methods.winograd_kernels import (
    matrices,
    output_transform,
    tiles_transform,
    weight_gradient,
    weight_transform,
)
from laconic.operators.scratch import fresh, scratch
from laconic.operators.shape import Convolution

# Columns of a product. Thin products are slow (63 GF/s for 98 columns of 256 channels, 77 for 196), thick ones leave
# the cache; between 128 and 512 the differences are small.
_COLUMNS = 256


@register("winograd")
@dataclass(frozen=True)
class Winograd:
    """Y = Aᵀ [ (G g Gᵀ) ⊙ (Bᵀ d B) ] A for m×m outputs a tile, kernels of 3×3 or 5×5.

    Cost: α² · K · C multiplications a tile of m² outputs, α = m + r − 1: for 3×3, 2.25 times fewer than the
    direct sum with m = 2 and 4 times with m = 4. Rounding errors grow with m.
    Source: Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, CVPR 2016.
    Differs: the interpolation points are 0, ±1, ½, −2 for α = 6, not 0, ±1, ±2.

    Args:
        outputs: m, of a tile's side: 2 or 4.
        channels_last: work on tensors whose channels lie side by side, and give such a one: quicker for small images,
            and for a chain of such layers.
    """

    outputs: int = 4
    channels_last: bool = False
    name: ClassVar[str]
    examples: ClassVar[tuple[str, ...]] = (
        "winograd(2)",
        "winograd(4)",
        "winograd(2, channels_last=true)",
        "winograd(4, channels_last=true)",
    )

    def __post_init__(self) -> None:
        if self.outputs not in (2, 4):
            raise BadInput(f"winograd: 2 or 4 outputs a side of a tile, not {self.outputs}")

    def refuses(self, conv: Convolution) -> str:
        if conv.kernel not in ((3, 3), (5, 5)):
            return "only kernels of 3×3 and 5×5"
        if self.outputs == 2 and conv.kernel == (5, 5):
            return "F(2, 5) does not pay: 0.6 to 1.1 times torch's speed on GoogLeNet's layers"
        if any(v != 1 for v in (*conv.stride, *conv.dilation)):
            return "only stride 1 and dilation 1"
        return "a channel a group leaves no matrix product" if conv.depthwise else ""

    def cost(self, conv: Convolution) -> Cost:
        m, r, alpha = self._sizes(conv)
        th, tw, rows = self._tiles(conv)
        inner = conv.in_channels // conv.groups
        channels, products = inner + conv.out_channels // conv.groups, inner * conv.out_channels
        workspace = alpha**2 * (products + channels * rows * tw) * conv.item_nbytes
        depth = 2 * log2_ceiling(r) + 4 * log2_ceiling(alpha) + log2_ceiling(inner)
        a, g, b = (np.abs(matrix).sum(1).max() ** 2 for matrix in matrices(m, r))
        bound = (inner + 2 * r + 4 * alpha) * a * g * b / r**2
        return Cost(alpha**2 * products * conv.batch * th * tw, depth, workspace, float(bound))

    def prepare(self, weight: Tensor, conv: Convolution) -> Tensor:
        """G g Gᵀ: groups, α², C, K."""
        m, r, alpha = self._sizes(conv)
        inner, outer = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        found = fresh((conv.groups, alpha**2, inner, outer), weight.dtype)
        for group, some in enumerate(weight.detach().split(outer)):
            weight_transform(m, r, conv.dtype)(some.transpose(0, 1).numpy(), found[group].numpy())
        return found

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        m, r, _ = self._sizes(conv)
        forth, back = tiles_transform(m, r, conv.dtype), output_transform(m, r, conv.dtype)
        start = x.new_zeros(conv.out_channels) if bias is None else bias.detach().contiguous()
        y = fresh(conv.output_shape, x.dtype, self.channels_last)
        outer = conv.out_channels // conv.groups
        every = zip(prepared, _grouped(x.detach(), conv), _grouped(y, conv), start.split(outer), strict=True)
        for weights, of_x, of_y, of_bias in every:
            for tiles, products, place in self._blocks(conv):
                forth(*of_x, *conv.padding, *place, tiles.numpy())
                torch.bmm(tiles, weights, out=products)
                back(products.numpy(), of_bias.numpy(), of_y[1], *place, of_y[0])
        return y

    def weight_gradient(self, x: Tensor, grad: Tensor, conv: Convolution) -> Tensor:
        """∇g = Gᵀ [ Σ_tiles (A ∇y Aᵀ) ⊙ (Bᵀ d B) ] G: the adjoint of the output in the weights."""
        m, r, alpha = self._sizes(conv)
        forth, of_grad = (tiles_transform(m, r, conv.dtype, gradient) for gradient in (False, True))
        shape = (conv.groups, alpha**2, conv.out_channels // conv.groups, conv.in_channels // conv.groups)
        found, total = fresh(conv.weight_shape, x.dtype), torch.empty(0)
        every = zip(_grouped(x, conv), _grouped(grad, conv), found.chunk(conv.groups), strict=True)
        for of_x, of_y, of_w in every:
            for tiles, slopes, place in self._blocks(conv, math.prod(shape[1:])):
                forth(*of_x, *conv.padding, *place, tiles.numpy())
                of_grad(*of_y, 0, 0, *place, slopes.numpy())
                if place[0] == 0:
                    total = scratch(math.prod(shape[1:]), x.dtype).view(shape[1:])
                    torch.bmm(slopes.transpose(1, 2), tiles, out=total)
                else:
                    total.baddbmm_(slopes.transpose(1, 2), tiles)
            weight_gradient(m, r, conv.dtype)(total.numpy(), of_w.numpy())
        return found

    def _blocks(self, conv: Convolution, skipped: int = 0) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Memory for a block's tiles [α², tiles, C] and products [α², tiles, K], behind the first `skipped` values of
        the workspace, and its place: first row, rows, tile rows an image, tiles a row."""
        square = self._sizes(conv)[2] ** 2
        th, tw, rows = self._tiles(conv)
        channels = (conv.in_channels // conv.groups, conv.out_channels // conv.groups)
        counts = [square * n * rows * tw for n in channels]
        memory = scratch(skipped + sum(counts), conv.torch_dtype)[skipped:].split(counts)
        for first in range(0, conv.batch * th, rows):
            some = min(rows, conv.batch * th - first)
            tiles, products = (
                whole[: square * n * some * tw].view(square, -1, n) for whole, n in zip(memory, channels, strict=True)
            )
            yield tiles, products, (first, some, th, tw)

    def _sizes(self, conv: Convolution) -> tuple[int, int, int]:
        """m, r, α."""
        return self.outputs, conv.kernel[0], self.outputs + conv.kernel[0] - 1

    def _tiles(self, conv: Convolution) -> tuple[int, int, int]:
        """Rows of tiles an image, tiles a row, and rows in a block."""
        th, tw = (-(-n // self.outputs) for n in conv.output)
        rows = max(1, min(conv.batch * th, _COLUMNS // tw))
        blocks = -(-conv.batch * th // rows)
        return th, tw, -(-conv.batch * th // blocks)


def _grouped(x: Tensor, conv: Convolution) -> Iterator[tuple[Any, bool]]:
    """The channels of each group as kernels take them: [N, C, H, W], or [N, H, W, C] and True."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    x = x.movedim(1, -1) if last else x.contiguous()
    for some in x.chunk(conv.groups, -1 if last else 1):
        yield some.numpy(), last
