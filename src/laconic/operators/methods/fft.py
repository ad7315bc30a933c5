"""`fft`: a convolution as a product of spectra, of the whole input or of overlapping tiles.

Callers: the registry. The kernels' transform is kept. With tiles the spectra are short and alike for every image size,
which is what makes 5×5 kernels pay; without, the cost does not depend on the kernel's size at all, which is what makes
kernels of hundreds of taps pay.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from scipy.fft import next_fast_len
from torch import Tensor

from laconic.errors import BadInput
from laconic.operators.method import MethodCost, log2_ceiling, register
from laconic.operators.shape import Convolution


@dataclass(frozen=True)
class _Tiles:
    """How an input is cut: `count` tiles of `length` values an axis that overlap, each giving `step` outputs."""

    length: tuple[int, ...]
    step: tuple[int, ...]
    count: tuple[int, ...]

    @property
    def frequencies(self) -> int:
        """Of a real transform of one tile."""
        return math.prod(self.length[:-1]) * (self.length[-1] // 2 + 1)


@register("fft")
@dataclass(frozen=True)
class Fft:
    """y = F⁻¹( Σ_c F(x_c) · conj F(w_kc) ), by overlap-save.

    Cost: 4·K·C real multiplications for each of L^d/2 frequencies of each of T tiles, beside c·L^d·log₂L^d for each
    transform. Strides are computed and thrown away. Depth 2⌈log₂ L^d⌉ + ⌈log₂ C⌉.
    Source: Mathieu, Henaff, LeCun, Fast Training of Convolutional Networks through FFTs, ICLR 2014; tiles: Zlateski et
    al., FFT Convolutions are Faster than Winograd on Modern CPUs, 2018.

    Args:
        tile: length of a tile's sides; 0 transforms the whole input at once.
    """

    tile: int = 0
    name: ClassVar[str]
    transforms: ClassVar[bool] = True
    examples: ClassVar[tuple[str, ...]] = ("fft", "fft(8)", "fft(12)")
    candidates: ClassVar[tuple[str, ...]] = (
        "fft",
        "fft(16)",
        "fft(32)",
        "fft(1024)",
        "fft(2048)",
        "fft(4096)",
        "fft(16384)",
    )

    def __post_init__(self) -> None:
        if self.tile < 0 or self.tile % 2:
            raise BadInput(f"fft: a tile has an even length, or 0 for none, not {self.tile}")

    def refuses(self, conv: Convolution) -> str:
        reach = max(d * (k - 1) + 1 for k, d in zip(conv.kernel, conv.dilation, strict=True))
        if self.tile and reach > self.tile // 2 + 1:
            return f"a kernel that reaches over {reach} values leaves too little of a tile of {self.tile}"
        longest = max(n + 2 * p for n, p in zip(conv.size, conv.padding, strict=True))
        if self.tile and self.tile >= longest:
            return f"the input of {longest} fits one tile of {self.tile}: use fft"
        return ""

    def cost(self, conv: Convolution) -> MethodCost:
        tiles = self._tiles(conv)
        every, values = conv.batch * math.prod(tiles.count), math.prod(tiles.length)
        products = conv.in_channels // conv.groups * conv.out_channels * tiles.frequencies
        spectra = (conv.in_channels + conv.out_channels) * every * tiles.frequencies + products
        inner = conv.in_channels // conv.groups
        # Transforms of length L are off by ε·log₂L of the norm, for a kernel of k taps √(L/k) of its largest sum.
        bound = (inner + 6 * log2_ceiling(values) + 8) * math.sqrt(values / math.prod(conv.kernel))
        depth = 2 * log2_ceiling(values) + log2_ceiling(inner)
        # A spectrum and its copy in the order of the product.
        return MethodCost(4 * products * every, depth, 2 * conv.item_nbytes * 2 * spectra, bound)

    def prepare(self, weight: Tensor, conv: Convolution) -> Tensor:
        """The conjugate spectra: frequencies, groups, K, C; for depthwise layers K, then the frequencies.

        For few channels and many frequencies: groups, K, C, then the frequencies.
        """
        tiles, weight = self._tiles(conv), weight.detach()
        if any(d > 1 for d in conv.dilation):
            reach = [d * (k - 1) + 1 for k, d in zip(conv.kernel, conv.dilation, strict=True)]
            spread = weight.new_zeros((*weight.shape[:2], *reach))
            spread[_last(slice(None, None, d) for d in conv.dilation)] = weight
            weight = spread
        spectra = torch.fft.rfftn(weight, s=tiles.length, dim=_axes(conv)).conj().resolve_conj()
        if conv.in_channels == conv.groups:
            return spectra.squeeze(1)
        if _few_channels(conv, tiles):
            return spectra.unflatten(0, (conv.groups, -1))[
                (..., *(None for _ in conv.size), *(slice(None) for _ in conv.size))
            ]
        spectra = spectra.flatten(2).unflatten(0, (conv.groups, -1))
        return spectra.permute(3, 0, 1, 2).contiguous()

    def run(self, x: Tensor, prepared: Any, bias: Tensor | None, conv: Convolution) -> Tensor:
        tiles, axes = self._tiles(conv), _axes(conv)
        spectra = torch.fft.rfftn(_cut(x.detach(), tiles, conv), s=tiles.length, dim=axes)  # N, C, counts, frequencies
        if conv.in_channels == conv.groups:
            spectra = spectra.repeat_interleave(conv.out_channels // conv.groups, 1)
            shape = (conv.out_channels, *(1 for _ in axes), *prepared.shape[1:])
            products = spectra * prepared.reshape(shape)
        elif _few_channels(conv, tiles):
            products = _accumulate(spectra, prepared, conv)
        else:
            products = _multiply(spectra, prepared, conv)
        y = torch.fft.irfftn(products, s=tiles.length, dim=axes)
        y = _join(y, tiles, conv)
        return y if bias is None else y.add_(bias.view(-1, *(1 for _ in axes)))

    def weight_gradient(self, x: Tensor, grad: Tensor, conv: Convolution) -> Tensor:
        """∇w = F⁻¹( Σ_n F(x) · conj F(∇y) ), whole inputs whatever the tile: the sums run over all of them."""
        tiles, axes = Fft(0)._tiles(conv), _axes(conv)
        if any(s > 1 for s in conv.stride):
            reach = [(n - 1) * s + 1 for n, s in zip(conv.output, conv.stride, strict=True)]
            spread = grad.new_zeros((*grad.shape[:2], *reach))
            spread[_last(slice(None, None, s) for s in conv.stride)] = grad
            grad = spread
        x = F.pad(x, [p for p in reversed(conv.padding) for _ in (0, 1)])
        inputs = torch.fft.rfftn(x, s=tiles.length, dim=axes)
        grads = torch.fft.rfftn(grad, s=tiles.length, dim=axes).conj()
        frequencies = inputs.shape[2:]
        inputs = inputs.flatten(2).unflatten(1, (conv.groups, -1)).permute(3, 1, 0, 2)  # F, g, N, C
        grads = grads.flatten(2).unflatten(1, (conv.groups, -1)).permute(3, 1, 2, 0)  # F, g, K, N
        products = torch.matmul(grads, inputs).permute(1, 2, 3, 0).reshape(conv.out_channels, -1, *frequencies)
        found = torch.fft.irfftn(products, s=tiles.length, dim=axes)
        taps = (slice(0, d * (k - 1) + 1, d) for k, d in zip(conv.kernel, conv.dilation, strict=True))
        return found[_last(taps)].contiguous()

    def _tiles(self, conv: Convolution) -> _Tiles:
        length, step, count = [], [], []
        kernel, padded = zip(conv.kernel, conv.dilation, strict=True), zip(conv.size, conv.padding, strict=True)
        for (k, d), (n, p), o, s in zip(kernel, padded, conv.output, conv.stride, strict=True):
            needed = (o - 1) * s + 1  # outputs before striding
            span = min(n + 2 * p, needed + d * (k - 1))
            whole = self.tile == 0 or span <= self.tile
            length.append(next_fast_len(span, real=True) if whole else self.tile)
            step.append(needed if whole else self.tile - d * (k - 1))
            count.append(-(-needed // step[-1]))
        return _Tiles(tuple(length), tuple(step), tuple(count))


def _axes(conv: Convolution) -> tuple[int, ...]:
    return (-1,) if len(conv.size) == 1 else (-2, -1)


def _last(slices: Iterable[slice]) -> Any:
    """An index of the last axes."""
    return (..., *slices)


def _cut(x: Tensor, tiles: _Tiles, conv: Convolution) -> Tensor:
    """The tiles of an input, as a view of its padded copy: N, C, counts, lengths (the last may be shorter)."""
    ends = []
    every = zip(conv.size, conv.padding, tiles.length, tiles.step, tiles.count, strict=True)
    for n, p, length, step, count in every:
        reach = (count - 1) * step + length if count > 1 else n + 2 * p
        ends += [reach - n - p, p]
    x = F.pad(x, ends[::-1])
    for axis, (length, step, count) in enumerate(zip(tiles.length, tiles.step, tiles.count, strict=True)):
        x = x.unfold(2 + axis, length if count > 1 else x.shape[2 + axis], step)
    return x


def _multiply(spectra: Tensor, prepared: Tensor, conv: Convolution) -> Tensor:
    """Σ_c for every frequency: one complex matrix product each."""
    batch, counts = spectra.shape[0], spectra.shape[2 : 2 + len(conv.size)]
    frequencies = spectra.shape[2 + len(conv.size) :]
    flat = spectra.reshape(batch, conv.groups, -1, math.prod(counts), math.prod(frequencies))
    flat = flat.permute(4, 1, 2, 0, 3).flatten(3)  # F, g, C, N·tiles
    products = torch.matmul(prepared, flat).unflatten(3, (batch, -1))
    return products.permute(3, 1, 2, 4, 0).reshape(batch, conv.out_channels, *counts, *frequencies)


def _few_channels(conv: Convolution, tiles: _Tiles) -> bool:
    """Whether Σ_c goes channel by channel along the frequencies, instead of by a tiny product for each of them.

    8 → 8 channels, 2049 frequencies, 5 tiles: 0.36 ms against 0.80; 513 frequencies, 22 tiles: 0.38 against 1.54.
    """
    return conv.in_channels // conv.groups <= 16 and tiles.frequencies >= 256 and len(conv.size) == 1


def _accumulate(spectra: Tensor, prepared: Tensor, conv: Convolution) -> Tensor:
    """Σ_c, one channel after the other: N, groups, 1, counts, frequencies times groups, K, 1, frequencies."""
    grouped = spectra.unflatten(1, (conv.groups, -1))
    total = grouped[:, :, 0, None] * prepared[:, :, 0]
    for channel in range(1, grouped.shape[2]):
        total.addcmul_(grouped[:, :, channel, None], prepared[:, :, channel])
    return total.flatten(1, 2)


def _join(y: Tensor, tiles: _Tiles, conv: Convolution) -> Tensor:
    """The outputs that are right in each tile, side by side, and every stride-th of them."""
    y = y[_last(slice(0, step) for step in tiles.step)]
    if len(conv.size) == 2:
        y = y.permute(0, 1, 2, 4, 3, 5)
    y = y.reshape(*y.shape[:2], *(count * step for count, step in zip(tiles.count, tiles.step, strict=True)))
    every = zip(conv.output, conv.stride, strict=True)
    return y[_last(slice(0, (o - 1) * s + 1, s) for o, s in every)].contiguous()
