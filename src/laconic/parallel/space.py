"""Layers that look at a window of an image, divided in height or width: each rank makes a strip of the output.

Callers: the forms `space` and `local`. A rank needs the input rows that its output rows look at; what it does not hold,
its neighbours lend (`Halo`). Where a window is, torch says: output o looks at inputs o·s − p … o·s − p + d(k − 1).
Zeros (of a maximum, −∞) stand where a window leaves the image; a rank inside the image pads nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.errors import BadInput
from laconic.parallel.boundary import Cut
from laconic.parallel.layer import Along, Context, Layer, check_pieces
from laconic.parallel.moves import Copy, Gather, Halo, Turn, even

DIMS = {"height": -2, "width": -1}


@dataclass(frozen=True)
class SpaceWindow:
    """The window of one dimension: kernel, stride, padding before and after, dilation; torch's ceil_mode."""

    kernel: int
    stride: int = 1
    before: int = 0
    after: int = 0
    dilation: int = 1
    ceil: bool = False

    def outputs(self, size: int) -> int:
        """How many outputs an input of this size has."""
        room = size + self.before + self.after - self.dilation * (self.kernel - 1) - 1
        count = (-(-room // self.stride) if self.ceil else room // self.stride) + 1
        if self.ceil and (count - 1) * self.stride >= size + self.before:
            count -= 1  # the last window must begin inside the image or its padding before
        return count

    def looks_at(self, first: int, last: int) -> tuple[int, int]:
        """The inputs [start, stop) that outputs [first, last) look at; beyond the image where they are padded."""
        start = first * self.stride - self.before
        return start, (last - 1) * self.stride - self.before + self.dilation * (self.kernel - 1) + 1

    def counts(self, size: int, first: int, last: int, padded: bool) -> Tensor:
        """How many inputs each of outputs [first, last) averages, with the padding or without."""
        starts = torch.arange(first, last) * self.stride - self.before
        stops = torch.clamp(starts + self.kernel, max=size + (self.after if padded else 0))
        return stops - (starts if padded else torch.clamp(starts, min=0))


def _pair(value: Any, dims: int) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, tuple | list) else (value,) * dims


def _windows(layer: Any, dims: int) -> list[SpaceWindow]:
    kernels, strides = _pair(layer.kernel_size, dims), _pair(layer.stride, dims)
    dilations = _pair(getattr(layer, "dilation", 1), dims)
    ceil = getattr(layer, "ceil_mode", False)
    found = []
    for index, (kernel, stride, dilation) in enumerate(zip(kernels, strides, dilations, strict=True)):
        if layer.padding == "same":
            total = dilation * (kernel - 1)
            before, after = total // 2, total - total // 2
        else:
            before = after = 0 if layer.padding == "valid" else _pair(layer.padding, dims)[index]
        found.append(SpaceWindow(kernel, stride, before, after, dilation, ceil))
    return found


@dataclass(frozen=True)
class Axis:
    """A dimension that is divided, counted from the last, and the cut it is divided over."""

    dim: int
    cut: Cut


class Strips(Layer):
    """A layer with windows of which each rank makes a strip; what it computes of its strip is `compute`.

    Args:
        windows: of the last dimensions of the image, in order.
        fill: what stands outside the image.
    """

    def __init__(
        self, name: str, context: Context, whole: nn.Module, takes: str, gives: str, axes: Sequence[Axis],
        windows: Sequence[SpaceWindow], fill: float = 0.0,
    ) -> None:  # fmt: skip
        super().__init__(name, context, whole, takes, gives)
        self.axes, self.windows, self.fill = list(axes), list(windows), fill
        self.shared = context.exact(f"{name} weights")

    def compute(self, x: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        """The strip from its padded inputs; a span is (first output, last output, whole input size) by dimension."""
        raise NotImplementedError

    def alike(self, parameter: Tensor | None) -> Tensor | None:
        """A parameter that all ranks hold, each for its own strip: its gradient is the sum."""
        return None if parameter is None else Copy(self.shared)(self.weigh(parameter))

    def forward(self, x: Tensor) -> Tensor:
        if self.takes == "rows":
            x = self._from_rows(x)
        sizes = self._whole_sizes(x)
        made = [window.outputs(size) for window, size in zip(self.windows, sizes, strict=True)]
        if min(made) < 1:
            raise BadInput(f"{self.cut.name}: the kernel is larger than the image of {' × '.join(map(str, sizes))}")
        spans = [(0, count, size) for count, size in zip(made, sizes, strict=True)]
        if self.takes == "whole":
            x = Copy(self.cut)(x)
        for axis in self.axes:
            x, spans[axis.dim] = self._cut(x, axis, made[axis.dim], sizes[axis.dim])
        y = self.compute(self._padded(x, spans), spans)
        for axis in self.axes:
            self.context.areas[axis.dim, y.shape[axis.dim]] = made[axis.dim]
        return self._given(y, made)

    def _from_rows(self, x: Tensor) -> Tensor:
        axis, size = self.axes[0], x.shape[self.axes[0].dim]
        x = Turn(self.cut, 0, self.context.rows(own=x.shape[0]).sizes, axis.dim, even(size, self.size))(x)
        self.context.areas[axis.dim, x.shape[axis.dim]] = size
        return x

    def _whole_sizes(self, x: Tensor) -> list[int]:
        sizes = list(x.shape[-len(self.windows) :])
        if self.takes != "whole":
            for axis in self.axes:
                own = x.shape[axis.dim]
                if (axis.dim, own) not in self.context.areas:
                    raise BadInput(f"{self.cut.name} takes a strip, and no layer before it gives one of {own} rows")
                sizes[axis.dim] = self.context.areas[axis.dim, own]
        return sizes

    def _cut(self, x: Tensor, axis: Axis, made: int, size: int) -> tuple[Tensor, tuple[int, int, int]]:
        """What this rank looks at along one axis, and its span of outputs."""
        window, cut = self.windows[axis.dim], axis.cut
        check_pieces(self.cut.name, "rows or columns of output", made, cut.size)
        edges = [sum(even(made, cut.size)[:rank]) for rank in range(cut.size + 1)]
        needs = []
        for rank in range(cut.size):
            start, stop = window.looks_at(edges[rank], edges[rank + 1])
            needs.append((min(max(start, 0), size), max(min(stop, size), min(max(start, 0), size))))
        first, last = needs[cut.rank]
        if self.takes == "whole":
            x = x.narrow(axis.dim, first, last - first)
        else:
            x = Halo(cut, axis.dim, even(size, cut.size), needs)(x)
        return x, (edges[cut.rank], edges[cut.rank + 1], size)

    def _padded(self, x: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        pads: list[int] = []
        for dim, (window, (first, last, size)) in enumerate(zip(self.windows, spans, strict=True)):
            start, stop = window.looks_at(first, last)
            pads = [max(0, -start), max(0, stop - max(size, start)), *pads]
            if start >= size:  # a window that begins behind the image
                pads[1] = stop - start
            if all(axis.dim != dim - len(spans) for axis in self.axes) and stop < size:
                x = x.narrow(dim - len(spans), 0, stop)
        return functional.pad(x, pads, value=self.fill) if any(pads) else x

    def _given(self, y: Tensor, made: list[int]) -> Tensor:
        if self.gives == "area":
            return y
        if self.gives == "rows":
            axis = self.axes[0]
            made_along = Along(axis.dim, tuple(even(made[axis.dim], self.size)))
            return self.in_pieces(y, made_along, self.context.rows(whole=y.shape[0]))
        for axis in self.axes:
            y = Gather(axis.cut, axis.dim, even(made[axis.dim], axis.cut.size))(y)
        return y


class DividedConvolution(Strips):
    """A convolution in strips; all ranks hold the same weight."""

    def __init__(
        self, name: str, context: Context, layer: Any, takes: str, gives: str, axes: Sequence[Axis]
    ) -> None:
        dims = layer.weight.dim() - 2
        if layer.padding_mode != "zeros":
            raise BadInput(f"{name} pads by '{layer.padding_mode}'; only padding with zeros is divided")
        super().__init__(name, context, layer, takes, gives, axes, _windows(layer, dims))
        self.hold("weight", layer.weight, {})
        self.hold("bias", layer.bias, {})
        self.settings = (layer.stride, 0, layer.dilation, layer.groups)
        self.op: Callable[..., Tensor] = (functional.conv1d, functional.conv2d, functional.conv3d)[dims - 1]

    def compute(self, x: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        strip: Tensor = self.op(x, self.alike(self.weight), self.alike(self.bias), *self.settings)
        return strip


class MaxPool(Strips):
    """Maxima in strips."""

    def __init__(
        self, name: str, context: Context, layer: Any, takes: str, gives: str, axes: Sequence[Axis]
    ) -> None:
        dims = 1 if isinstance(layer, nn.MaxPool1d) else 2
        if layer.return_indices:
            raise BadInput(f"{name} returns indices, which would be those of a strip; it cannot be divided")
        super().__init__(name, context, layer, takes, gives, axes, _windows(layer, dims), -math.inf)
        self.op: Callable[..., Tensor] = functional.max_pool1d if dims == 1 else functional.max_pool2d

    def compute(self, x: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        kernel = [window.kernel for window in self.windows]
        stride, dilation = [w.stride for w in self.windows], [w.dilation for w in self.windows]
        maxima: Tensor = self.op(x, kernel, stride, 0, dilation)
        return maxima


class MeanPool(Strips):
    """Means in strips."""

    def __init__(
        self, name: str, context: Context, layer: Any, takes: str, gives: str, axes: Sequence[Axis]
    ) -> None:
        dims = 1 if isinstance(layer, nn.AvgPool1d) else 2
        super().__init__(name, context, layer, takes, gives, axes, _windows(layer, dims))
        self.padded, self.divisor = layer.count_include_pad, getattr(layer, "divisor_override", None)
        self.op: Callable[..., Tensor] = functional.avg_pool1d if dims == 1 else functional.avg_pool2d

    def compute(self, x: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        kernel = [window.kernel for window in self.windows]
        sums: Tensor = self.op(x, kernel, [window.stride for window in self.windows]) * math.prod(kernel)
        if self.divisor:
            return sums / float(self.divisor)
        for dim, (window, (first, last, size)) in enumerate(zip(self.windows, spans, strict=True)):
            counts = window.counts(size, first, last, self.padded).to(device=x.device, dtype=x.dtype)
            sums = sums / counts.view([-1] + [1] * (len(spans) - dim - 1))
        return sums


class Locations(Strips):
    """A locally connected layer, divided by location in height: a rank holds the filters of its strip."""

    def __init__(
        self, name: str, context: Context, layer: Any, takes: str, gives: str, axes: Sequence[Axis]
    ) -> None:
        pad = layer.kernel // 2
        window = SpaceWindow(layer.kernel, 1, pad, pad)
        super().__init__(name, context, layer, takes, gives, axes, [window, window])
        width, sizes = layer.size, even(layer.size, self.size)
        starts = [sum(sizes[:rank]) for rank in range(self.size)]
        pixels = [
            torch.arange(start * width, (start + size) * width) for start, size in zip(starts, sizes, strict=True)
        ]
        self.hold("weight", layer.weight, {0: pixels})
        self.hold("bias", layer.bias, {0: pixels})
        self.kernel, self.outputs, self.width = layer.kernel, layer.outputs, width

    def compute(self, x: Tensor, spans: Sequence[tuple[int, int, int]]) -> Tensor:
        assert self.bias is not None
        return local_product(x, self.weigh(self.weight), self.weigh(self.bias), self.kernel)


def local_product(padded: Tensor, weight: Tensor, bias: Tensor, kernel: int) -> Tensor:
    """A filter of its own at every pixel of an image that is padded already, as `LocallyConnected2d` does."""
    pixels = padded.permute(2, 3, 0, 1)
    height, width = pixels.shape[0] - kernel + 1, pixels.shape[1] - kernel + 1
    shifts = [(i, j) for i in range(kernel) for j in range(kernel)]
    patches = torch.cat([pixels[i : i + height, j : j + width] for i, j in shifts], dim=3)
    sums = torch.baddbmm(bias.unsqueeze(1), patches.flatten(0, 1), weight)
    return sums.permute(1, 2, 0).reshape(-1, weight.shape[-1], height, width)
