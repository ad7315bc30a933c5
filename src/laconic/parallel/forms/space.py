"""`Space`: convolutions and pools divided in height or width, with halo exchange."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.errors import BadInput
from laconic.parallel.layer import Context, Layer
from laconic.parallel.plan import DividedForm, check_count, one_of, register
from laconic.parallel.space import DIMS, Axis, DividedConvolution, MaxPool, MeanPool, Strips

_MAKERS: dict[type[nn.Module], Callable[..., Strips]] = {
    nn.Conv1d: DividedConvolution, nn.Conv2d: DividedConvolution, nn.MaxPool1d: MaxPool, nn.MaxPool2d: MaxPool,
    nn.AvgPool1d: MeanPool, nn.AvgPool2d: MeanPool,
}  # fmt: skip


@register("space")
@dataclass(frozen=True)
class Space(DividedForm):
    """A convolution or a pool of which each rank makes a strip of the image; any kernel, stride, padding and dilation.

    A rank sends the rows its neighbours' windows reach over, about N·C·W·(k − s) values a neighbour and way; nothing
    but the weight's gradient depends on the number of weights.

    Args:
        split: height, width, or both on a grid of ranks.
        takes: how its input lies: whole, rows or area (a strip); by default area after a layer that gives it.
        gives: how its output lies.
        grid: rows of the grid for both; the nearest to a square by default.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = tuple(_MAKERS)
    part: ClassVar[str] = "area"

    split: str = "height"
    takes: str | None = None
    gives: str | None = None
    grid: int | None = None

    def __post_init__(self) -> None:
        one_of("the split of space", self.split, (*DIMS, "both"))
        for value in (self.takes, self.gives):
            one_of("takes and gives", value or "whole", ("whole", "rows", "area"))
        if self.grid is not None:
            check_count("grid", self.grid)
        if self.split == "both" and "rows" in (self.takes, self.gives):
            raise BadInput("rows become strips of height or of width; space in both takes and gives whole or area")

    opens = closes = True

    @property
    def pieces(self) -> object:
        return self.split, self.grid

    def make(self, name: str, module: nn.Module, context: Context, takes: str, gives: str) -> Layer:
        if isinstance(module, nn.Conv1d | nn.MaxPool1d | nn.AvgPool1d) and self.split != "width":
            raise BadInput(f"{name} has one dimension; divide it by space('width')")
        maker = next(maker for kind, maker in _MAKERS.items() if isinstance(module, kind))
        return maker(name, context, module, takes, gives, axes(name, context, self.split, self.grid))


def axes(name: str, context: Context, split: str, grid: int | None = None) -> list[Axis]:
    """The dimensions that a split divides, each with its cut."""
    if split != "both":
        return [Axis(DIMS[split], context.cut(name))]
    ranks = context.world.world_size
    rows = grid or max(r for r in range(1, math.isqrt(ranks) + 1) if ranks % r == 0)
    if ranks % rows:
        raise BadInput(f"{name}: {ranks} ranks make no grid of {rows} rows")
    columns = ranks // rows
    in_column = context.part_of([rank % columns for rank in range(ranks)])
    in_row = context.part_of([rank // columns for rank in range(ranks)])
    return [Axis(DIMS["height"], context.cut(name, in_column)), Axis(DIMS["width"], context.cut(name, in_row))]
