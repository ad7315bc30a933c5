"""A layer that multiplies by a weight (out, in, …), divided by output or by input: dense layers and convolutions.

    output   y_r = W_r x           all of x is needed; outputs are stacked
    input    y = Σ_r W_r x_r + b   x in pieces; outputs are added

Callers: the forms `dense` and `channels`. A bias is divided by output in both; of added outputs, each rank adds its
piece of the bias to its own sums.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.conv import _ConvNd

from laconic.errors import BadInput
from laconic.parallel.boundary import Cut
from laconic.parallel.layer import Along, Context, Layer, check_pieces, fresh, runs
from laconic.parallel.moves import begin_sums, even, piece

Op = Callable[[Tensor, Tensor, Tensor | None], Tensor]
PIECES, PIECE_NBYTES = 2, 2**15  # sums travel in so many pieces at most, each of so many bytes at least


def sizes_of(numel: int, ranks: int, unit: int = 1) -> list[int]:
    """Nearly equal pieces of `numel` in multiples of `unit`.

    >>> sizes_of(96, 4, unit=16)
    [16, 32, 16, 32]
    """
    return [count * unit for count in even(numel // unit, ranks)]


def operation(layer: nn.Module) -> Op:
    """y = op(x, weight, bias) of a layer, for any part of its weight."""
    if isinstance(layer, nn.Linear):
        return functional.linear
    shell: Any = copy.copy(layer)
    shell._parameters = {}
    forward: Op = shell._conv_forward
    return forward


def _begin_rows(
    cut: Cut, rows: Tensor, product: Callable[[Tensor], Tensor], width: int, way: str
) -> Callable[[], Tensor]:
    """Start to add up `product(rows)` over ranks, in pieces: one travels while the next is computed."""
    nbytes = cut.predicted_nbytes(way, len(rows) * width, rows.dtype)
    count = max(1, min(PIECES, nbytes // PIECE_NBYTES, len(rows)))
    sizes = even(len(rows), count)
    made = (product(piece(rows, 0, sizes, number)) for number in range(count))
    begun = begin_sums(cut, made, [(size, width) for size in sizes], rows, way)
    return lambda: torch.cat(begun())


class _SummedLinear(torch.autograd.Function):
    """A dense layer whose output (`way` forward) or whose input's gradient (backward) is added up over ranks.

    In backward the sum travels while the weight's gradient is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, cut: Cut, way: str) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.cut, ctx.way, ctx.biased = cut, way, bias is not None
        if way == "backward":
            return functional.linear(x, weight, bias)
        rows = x.reshape(-1, x.shape[-1])
        summed = _begin_rows(cut, rows, lambda part: functional.linear(part, weight, bias), len(weight), way)
        return summed().view(*x.shape[:-1], len(weight))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, y: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        (x, weight), rows, of_x = ctx.saved_tensors, y.reshape(-1, y.shape[-1]), None
        if ctx.needs_input_grad[0] and ctx.way == "backward":
            of_x = _begin_rows(ctx.cut, rows, lambda part: part @ weight, x.shape[-1], ctx.way)
        elif ctx.needs_input_grad[0]:
            of_x = partial(torch.mm, rows, weight)
        of_weight = rows.t() @ x.reshape(-1, x.shape[-1]) if ctx.needs_input_grad[1] else None
        of_bias = rows.sum(0) if ctx.biased and ctx.needs_input_grad[2] else None
        return None if of_x is None else of_x().view(x.shape), of_weight, of_bias, None, None


class Product(Layer):
    """A dense layer or a convolution, divided by output or by input.

    Args:
        blocks: the outputs are so many matrices in one, such as query, key and value; each is divided.
        unit: pieces are multiples of it, such as the width of a head.
    """

    def __init__(
        self, name: str, context: Context, layer: nn.Module, takes: str, gives: str, split: str, blocks: int = 1,
        unit: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(name, context, layer, takes, gives)
        assert isinstance(layer, nn.Linear | _ConvNd)
        self.split, self.blocks = split, blocks
        self.dim = -1 if isinstance(layer, nn.Linear) else 1
        outputs, inputs = layer.weight.shape[:2]
        self.op = operation(layer)
        if (outputs if split == "output" else inputs) % (unit * blocks):
            what = f"{blocks} × multiples of {unit}"
            raise BadInput(f"{name} cannot be cut in {what}: its weight is {outputs} × {inputs}")
        self.inputs = Along(self.dim, tuple(sizes_of(inputs, self.size, unit)))
        self.outputs = Along(self.dim, tuple(size * blocks for size in sizes_of(outputs // blocks, self.size, unit)))
        whole_bias: Tensor | None = layer.bias
        if split == "output":
            check_pieces(name, "outputs", outputs // (unit * blocks), self.size)
            index = _block_runs(sizes_of(outputs // blocks, self.size, unit), blocks)
            self.back = torch.argsort(torch.cat(index)) if blocks > 1 else None  # ranks' order to the layer's
            pieces, bias_index = {0: index}, index
        else:
            check_pieces(name, "inputs", inputs // unit, self.size)
            pieces = {1: runs(self.inputs.sizes)}
            bias_index = runs(even(outputs, self.size))
            start = int(bias_index[self.cut.rank][0]) if len(bias_index[self.cut.rank]) else 0
            self.around = (start, outputs - start - len(bias_index[self.cut.rank]))
        self.hold("weight", layer.weight, pieces)
        self.hold("bias", whole_bias, {0: bias_index})
        self._start_unmade(layer)

    def _start_unmade(self, layer: nn.Module) -> None:
        """Initialise parameters that were divided on the meta device."""
        for name, parameter in list(self._parameters.items()):
            if parameter is not None and parameter.is_meta and not self.cut.silent:
                if not isinstance(layer, nn.Linear):
                    raise BadInput(f"{self.cut.name} is on the meta device; only dense layers are made in parts")
                made = nn.Parameter(fresh(layer, parameter.shape), parameter.requires_grad)
                self.register_parameter(name, made)

    def forward(self, x: Tensor) -> Tensor:
        weight, bias = self.weigh(self.weight), None if self.bias is None else self.weigh(self.bias)
        if self.split == "output":
            y = self._used(x, weight, bias)
            if self.gives == "part":
                return y
            y = self.out_of_pieces(y, self.outputs, self._given(y))
            return y if self.back is None else y.index_select(self.dim, self.back.to(y.device))
        x = self.in_pieces(x, self._taken(x), self.inputs)
        padded = None if bias is None else functional.pad(bias, self.around)
        if self.gives == "whole" and self._plain(x):
            return self._summed(x, weight, padded, "forward")
        y = self.op(x, weight, padded)
        return self.out_of_sums(y, self.outputs if self.gives == "part" else self._given(y))

    def _plain(self, x: Tensor) -> bool:
        """Whether this is a dense layer in the dtype it has."""
        casts = not x.is_meta and torch.is_autocast_enabled(x.device.type)
        return self.op is functional.linear and not casts

    def _used(self, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        """This rank's outputs, of all of x."""
        held = self._taken(x)
        if self.takes == "use":
            return self.op(x, weight, bias)
        if held is None and self._plain(x):
            return self._summed(x, weight, bias, "backward")
        return self.op(self.for_use(x, held), weight, bias)

    def _summed(self, x: Tensor, weight: Tensor, bias: Tensor | None, way: str) -> Tensor:
        made: Tensor = _SummedLinear.apply(x, weight, bias, self.cut, way)  # type: ignore[no-untyped-call]
        return made

    def _taken(self, x: Tensor) -> Along | None:
        if self.takes == "part":
            return self.inputs
        return self.context.rows(own=x.shape[0]) if self.takes == "rows" else None

    def _given(self, y: Tensor) -> Along | None:
        return self.context.rows(whole=y.shape[0]) if self.gives == "rows" else None


def _block_runs(sizes: list[int], blocks: int) -> list[Tensor]:
    """Indices by rank, where each of `blocks` equal runs is cut into pieces of these sizes."""
    one = runs(sizes)
    return [torch.cat([block * sum(sizes) + piece for block in range(blocks)]) for piece in one]
