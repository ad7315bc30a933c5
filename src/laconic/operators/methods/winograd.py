"""`winograd`: minimal filtering, fewer multiplications for small kernels.

Callers: the registry. Three steps over a block of rows of tiles at a time, so that the block stays in cache: transform
the input's tiles, one matrix product for each of the α² positions in a tile, transform the products back.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.operators.method import Cost, log2_ceiling, register
from laconic.operators.methods import winograd_last
from laconic.operators.methods.winograd_kernels import input_transform, matrices, output_transform, weight_transform
from laconic.operators.scratch import scratch
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
        if self.channels_last and conv.groups > 1:
            return "with channels last, only one group"
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
        """G g Gᵀ: groups, α², K, C; with channels last α², C, K."""
        m, r, alpha = self._sizes(conv)
        shape = (conv.groups, alpha**2, conv.out_channels // conv.groups, conv.in_channels // conv.groups)
        found = weight.new_empty(shape, requires_grad=False)
        grouped = weight.detach().contiguous().view(conv.groups, -1, *weight.shape[1:])
        for group in range(conv.groups):
            weight_transform(m, r, conv.dtype)(grouped[group].numpy(), found[group].numpy())
        return found[0].transpose(1, 2).contiguous() if self.channels_last else found

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        start = x.new_zeros(conv.out_channels) if bias is None else bias.detach().contiguous()
        if self.channels_last:
            return self._last(x.detach(), prepared, start, conv)
        x, y = x.detach().contiguous(), x.new_empty(conv.output_shape)
        inner, outer = conv.in_channels // conv.groups, conv.out_channels // conv.groups
        m, r, _ = self._sizes(conv)
        forth, back = input_transform(m, r, conv.dtype), output_transform(m, r, conv.dtype)
        for group in range(conv.groups):
            of_x = x[:, group * inner : (group + 1) * inner].numpy()
            of_y = y[:, group * outer : (group + 1) * outer].numpy()
            of_bias = start[group * outer : (group + 1) * outer].numpy()
            for tiles, products, place in self._blocks(x, (inner, outer), conv):
                forth(of_x, *conv.padding, *place, tiles.numpy())
                torch.bmm(prepared[group], tiles, out=products)
                back(products.numpy(), of_bias, *place, of_y)
        return y

    def _last(self, x: Tensor, prepared: Tensor, bias: Tensor, conv: Convolution) -> Tensor:
        m, r, _ = self._sizes(conv)
        forth, back = winograd_last.input_transform(m, r, conv.dtype), winograd_last.output_transform(m, r, conv.dtype)
        x = x.contiguous(memory_format=torch.channels_last)
        y = torch.empty(conv.output_shape, dtype=x.dtype, memory_format=torch.channels_last)
        of_x, of_y = x.permute(0, 2, 3, 1).contiguous().numpy(), y.permute(0, 2, 3, 1).numpy()
        for tiles, products, place in self._blocks(x, (conv.in_channels, conv.out_channels), conv):
            flat, out = (
                tiles.view(tiles.shape[0], -1, conv.in_channels),
                products.view(tiles.shape[0], -1, conv.out_channels),
            )
            forth(of_x, *conv.padding, *place, flat.numpy())
            torch.bmm(flat, prepared, out=out)
            back(out.numpy(), bias.numpy(), *place, of_y)
        return y

    def _blocks(
        self, like: Tensor, channels: tuple[int, int], conv: Convolution
    ) -> Iterator[tuple[Tensor, Tensor, Any]]:
        """Memory for a block's tiles and products, and its place: first row, rows, tile rows an image, tiles a row."""
        square = self._sizes(conv)[2] ** 2
        th, tw, rows = self._tiles(conv)
        counts = [square * n * rows * tw for n in channels]
        v, q = scratch(sum(counts), like.dtype).split(counts)
        for first in range(0, conv.batch * th, rows):
            some = min(rows, conv.batch * th - first)
            tiles, products = (
                memory[: square * n * some * tw].view(square, n, -1) for memory, n in zip((v, q), channels, strict=True)
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
