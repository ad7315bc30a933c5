"""`winograd`: minimal filtering, fewer multiplications for small kernels.

Callers: the registry. Three steps over a block of rows of tiles at a time, so that the block stays in cache: transform
the input's tiles, one matrix product for each of the α² positions in a tile, transform the products back.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.kernels import Array
from laconic.operators.method import MethodCost, log2_ceiling, register
from laconic.operators.methods.winograd_kernels import (
    matrices,
    output_transform,
    tiles_transform,
    weight_gradient,
    weight_transform,
)
from laconic.operators.products import add_transposed, multiply, panel, row
from laconic.operators.scratch import fresh, scratch
from laconic.operators.shape import Convolution
from laconic.operators.vectors import padded

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
    transforms: ClassVar[bool] = True
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

    def cost(self, conv: Convolution) -> MethodCost:
        tiling = _tiling(self.outputs, conv)
        m, r, alpha = tiling.m, tiling.r, tiling.alpha
        workspace = alpha**2 * (conv.groups * tiling.kept + tiling.most * sum(tiling.widths))
        depth = 2 * log2_ceiling(r) + 4 * log2_ceiling(alpha) + log2_ceiling(tiling.inner)
        a, g, b = (np.abs(matrix).sum(1).max() ** 2 for matrix in matrices(m, r))
        bound = (tiling.inner + 2 * r + 4 * alpha) * a * g * b / r**2
        multiplications = alpha**2 * tiling.inner * conv.out_channels * conv.batch * tiling.th * tiling.tw
        return MethodCost(multiplications, depth, workspace * conv.item_nbytes, float(bound))

    def prepare(self, weight: Tensor, conv: Convolution) -> Tensor:
        """G g Gᵀ: for each group and each of the α² positions a matrix of C × K, in panels of some columns."""
        tiling = _tiling(self.outputs, conv)
        found = fresh((conv.groups, tiling.alpha**2, tiling.kept), weight.dtype)
        transform = weight_transform(tiling.m, tiling.r, conv.dtype)
        for some, into in zip(weight.detach().chunk(conv.groups), found, strict=True):
            transform(some.transpose(0, 1).numpy(), into.numpy())
        return found

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        tiling, dtype = _tiling(self.outputs, conv), conv.dtype
        forth, back = (make(tiling.m, tiling.r, dtype) for make in (tiles_transform, output_transform))
        start = np.zeros(conv.out_channels, dtype) if bias is None else bias.detach().numpy()
        y = fresh(conv.output_shape, x.dtype, self.channels_last)
        product, outer, of_group = multiply(dtype), tiling.outer, slice(0, 0)
        for weights, of_x, of_y in zip(prepared.numpy(), _grouped(x, conv), _grouped(y, conv), strict=True):
            of_group = slice(of_group.stop, of_group.stop + outer)
            for tiles, products, place in tiling.blocks(x.dtype):
                forth(*of_x, *conv.padding, *place, tiles)
                product(tiles, weights, products, tiling.inner, tiling.columns)
                back(products, start[of_group], of_y[1], *place, of_y[0])
        return y

    def weight_gradient(self, x: Tensor, grad: Tensor, conv: Convolution) -> Tensor:
        """∇g = Gᵀ [ Σ_tiles (A ∇y Aᵀ) ⊙ (Bᵀ d B) ] G: the adjoint of the output in the weights."""
        tiling, found = _tiling(self.outputs, conv), fresh(conv.weight_shape, x.dtype)
        forth, of_grad = (tiles_transform(tiling.m, tiling.r, conv.dtype, gradient) for gradient in (False, True))
        shape = (tiling.alpha**2, tiling.outer, tiling.widths[0])
        numel = math.prod(shape)
        for of_x, of_y, of_w in zip(_grouped(x, conv), _grouped(grad, conv), found.chunk(conv.groups), strict=True):
            for tiles, slopes, place in tiling.blocks(x.dtype, numel):
                forth(*of_x, *conv.padding, *place, tiles)
                of_grad(*of_y, 0, 0, *place, slopes)
                total = scratch(numel, x.dtype).numpy().reshape(shape)
                add_transposed(conv.dtype)(slopes, tiles, total, place[0] > 0)
            weight_gradient(tiling.m, tiling.r, conv.dtype)(total, of_w.numpy())
        return found


@dataclass(frozen=True)
class _Tiling:
    """How a convolution is cut: th × tw tiles an image, α = m + r − 1 wide, and some rows of tiles a block.

    `inner` and `outer` are channels of a group, `columns` the outer ones in whole vectors, `kept` the values of a
    matrix of weights in panels, `widths` what a row of tiles and of products takes, `most` the tiles of the largest
    block, `places` of each block its first row of tiles and how many.
    """

    m: int
    r: int
    th: int
    tw: int
    inner: int
    outer: int
    columns: int
    kept: int
    widths: tuple[int, int]
    most: int
    places: tuple[tuple[int, int], ...]

    @property
    def alpha(self) -> int:
        return self.m + self.r - 1

    def blocks(self, dtype: torch.dtype, skipped: int = 0) -> Iterator[tuple[Array, Array, Any]]:
        """Memory for a block's tiles [α², tiles, ≥ C] and products [α², tiles, ≥ K], behind the first `skipped` values
        of the workspace, and its place: first row, rows, tile rows an image, tiles a row."""
        square = self.alpha**2
        counts = [square * self.most * width for width in self.widths]
        memory = scratch(skipped + sum(counts), dtype).numpy()[skipped:]
        for first, rows in self.places:
            shapes = [(square, rows * self.tw, width) for width in self.widths]
            tiles, products = (
                some[: math.prod(shape)].reshape(shape)
                for some, shape in zip((memory, memory[counts[0] :]), shapes, strict=True)
            )
            yield tiles, products, (first, rows, self.th, self.tw)


@cache
def _tiling(m: int, conv: Convolution) -> _Tiling:
    th, tw = (-(-n // m) for n in conv.output)
    every = conv.batch * th
    blocks = -(-every // max(1, _COLUMNS // tw))
    rows = -(-every // blocks)
    inner, outer = conv.in_channels // conv.groups, conv.out_channels // conv.groups
    return _Tiling(
        m, conv.kernel[0], th, tw, inner, outer, padded(outer, conv.dtype),
        inner * -(-outer // panel(conv.dtype)) * panel(conv.dtype),
        (row(inner, conv.dtype), row(outer, conv.dtype)), rows * tw,
        tuple((first, min(rows, every - first)) for first in range(0, every, rows)),
    )  # fmt: skip


def _grouped(x: Tensor, conv: Convolution) -> Iterator[tuple[Any, bool]]:
    """The channels of each group as kernels take them: [N, C, H, W], or [N, H, W, C] and True."""
    last = x.is_contiguous(memory_format=torch.channels_last) and not x.is_contiguous()
    x = x.detach().movedim(1, -1) if last else x.detach().contiguous()
    for some in (x,) if conv.groups == 1 else x.chunk(conv.groups, -1 if last else 1):
        yield some.numpy(), last
