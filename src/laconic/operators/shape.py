"""What a convolution computes, apart from how: its sizes as one record.

Callers: every method, the tuner, the cost figures. In nn.Conv1d's and nn.Conv2d's sense (a correlation):

    y[n, k, o] = b[k] + Σ_c Σ_j w[k, c, j] · x[n, c, o·stride + j·dilation − padding]

with o and j running over one axis or two.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.errors import BadInput, UnknownName


@dataclass(frozen=True)
class Convolution:
    """The sizes of a convolution.

    Attributes:
        batch: samples N.
        in_channels: C.
        out_channels: K.
        size: of the input, one or two lengths.
        kernel, stride, padding, dilation: one value an axis; `padding` is on both sides, with zeros.
        groups: the channels are cut into so many separate convolutions.
        dtype: "float32" or "float64".
    """

    batch: int
    in_channels: int
    out_channels: int
    size: tuple[int, ...]
    kernel: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[int, ...]
    dilation: tuple[int, ...]
    groups: int = 1
    dtype: str = "float32"

    def __post_init__(self) -> None:
        axes = len(self.size)
        if axes not in (1, 2) or any(len(v) != axes for v in (self.kernel, self.stride, self.padding, self.dilation)):
            raise BadInput(f"a convolution has one or two axes, and a value of each option for each: {self}")
        for name, least in (("stride", 1), ("padding", 0), ("dilation", 1)):
            if min(getattr(self, name)) < least:
                raise BadInput(f"the {name} of a convolution is {least} or more, not {getattr(self, name)}")
        if self.groups < 1 or self.in_channels % self.groups or self.out_channels % self.groups:
            raise BadInput(f"{self.groups} groups do not divide {self.in_channels} and {self.out_channels} channels")
        if min(self.output) < 1:
            raise BadInput(f"a kernel of {self.kernel} is larger than its padded input of {self.size}")

    @property
    def output(self) -> tuple[int, ...]:
        """Lengths of the output: ⌊(size + 2·padding − dilation·(kernel − 1) − 1) / stride⌋ + 1."""
        every = zip(self.size, self.kernel, self.stride, self.padding, self.dilation, strict=True)
        return tuple((n + 2 * p - d * (k - 1) - 1) // s + 1 for n, k, s, p, d in every)

    @property
    def terms(self) -> int:
        """Products summed for one output: C/groups · Π kernel."""
        return self.in_channels // self.groups * math.prod(self.kernel)

    @property
    def multiplications(self) -> int:
        """Of the direct method: N · K · Π output · terms."""
        return self.batch * self.out_channels * math.prod(self.output) * self.terms

    @property
    def input_shape(self) -> tuple[int, ...]:
        return (self.batch, self.in_channels, *self.size)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        return (self.out_channels, self.in_channels // self.groups, *self.kernel)

    @property
    def output_shape(self) -> tuple[int, ...]:
        return (self.batch, self.out_channels, *self.output)

    @property
    def depthwise(self) -> bool:
        """Whether every channel is a group of its own."""
        return self.groups == self.in_channels and self.groups > 1

    @property
    def torch_dtype(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found

    @property
    def item_nbytes(self) -> int:
        return self.torch_dtype.itemsize

    @property
    def nbytes(self) -> int:
        """Of input, weights and output, each once: what any method has to move."""
        shapes = (self.input_shape, self.weight_shape, self.output_shape)
        return self.item_nbytes * sum(math.prod(shape) for shape in shapes)

    def with_batch(self, batch: int) -> Convolution:
        """The same for another number of samples."""
        return replace(self, batch=batch)

    def adjoint(self) -> Convolution | None:
        """The convolution that computes the gradient of the input from that of the output; None where it is none.

        With stride 1 it is one of the output's gradient with the weights turned by half a turn and their channels
        exchanged, padded by dilation·(kernel − 1) − padding.
        """
        every = zip(self.kernel, self.padding, self.dilation, strict=True)
        padding = tuple(d * (k - 1) - p for k, p, d in every)
        if any(s != 1 for s in self.stride) or min(padding) < 0:
            return None
        return replace(self, in_channels=self.out_channels, out_channels=self.in_channels, size=self.output,
                       padding=padding)  # fmt: skip

    def planar(self) -> Convolution:
        """The same with two axes; a single one becomes the second."""
        if len(self.size) == 2:
            return self
        return replace(self, size=(1, *self.size), kernel=(1, *self.kernel), stride=(1, *self.stride),
                       padding=(0, *self.padding), dilation=(1, *self.dilation))  # fmt: skip

    def __str__(self) -> str:
        def times(values: Sequence[int]) -> str:
            return "×".join(str(v) for v in values)

        text = f"{self.batch}×{self.in_channels}×{times(self.size)} → {self.out_channels}, {times(self.kernel)}"
        for name, usual in (("stride", 1), ("padding", 0), ("dilation", 1)):
            values = getattr(self, name)
            if any(v != usual for v in values):
                text += f", {name} {times(values)}"
        return text + (f", {self.groups} groups" if self.groups > 1 else "")


Options = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], int]


def on_both_sides(
    padding: str | int | tuple[int, ...], kernel: Sequence[int], dilation: Sequence[int]
) -> tuple[int, ...] | None:
    """What is added on both sides of each axis; None where "same" is not the same on both.

    >>> on_both_sides("same", (3, 5), (1, 2)), on_both_sides("same", (2,), (1,)), on_both_sides(1, (3, 3), (1, 1))
    ((1, 4), None, (1, 1))
    """
    if isinstance(padding, int):
        return (padding,) * len(kernel)
    if not isinstance(padding, str):
        return tuple(padding)
    if padding not in ("same", "valid"):
        raise UnknownName("padding", padding, ("same", "valid"))
    both = [d * (k - 1) if padding == "same" else 0 for d, k in zip(dilation, kernel, strict=True)]
    return None if any(n % 2 for n in both) else tuple(n // 2 for n in both)


def of_tensors(x: Tensor, weight: Tensor, options: Options) -> Convolution:
    """The convolution of `x` with `weight`; options: stride, padding, dilation, groups.

    Raises:
        BadInput: the shapes or types do not fit each other.
    """
    stride, padding, dilation, groups = options
    if x.dim() != weight.dim() or x.dim() not in (3, 4) or x.shape[1] != weight.shape[1] * groups:
        shapes = f"an input of shape {tuple(x.shape)} does not fit weights of shape {tuple(weight.shape)}"
        raise BadInput(f"{shapes} in {groups} groups")
    if x.dtype != weight.dtype or x.dtype not in (torch.float32, torch.float64):
        raise BadInput(f"input and weights are both float32 or both float64, not {x.dtype} and {weight.dtype}")
    batch, channels, *size = x.shape
    return Convolution(batch, channels, weight.shape[0], tuple(size), tuple(weight.shape[2:]), stride, padding,
                       dilation, groups, str(x.dtype).removeprefix("torch."))  # fmt: skip
