"""`Dense`: dense layers divided by output, by input, or on a grid of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.errors import BadInput
from laconic.parallel.grids import Cannon, OneAndAHalf, Summa
from laconic.parallel.layer import Context, Layer
from laconic.parallel.plan import SplitForm, check_count, one_of, register
from laconic.parallel.product import Product

SPLITS = ("output", "input", "summa", "cannon", "1.5d")
_GRIDS: dict[str, type[Summa] | type[Cannon] | type[OneAndAHalf]] = {
    "summa": Summa, "cannon": Cannon, "1.5d": OneAndAHalf,
}  # fmt: skip


@register("dense")
@dataclass(frozen=True)
class Dense(SplitForm):
    """A dense layer divided over all ranks. For B rows, I inputs, O outputs and P ranks a rank sends, forward:

    output to whole BO(P−1)/P, to part nothing; input to whole 2BO(P−1)/P (two ranks: BO); backward as much of BI.

    Args:
        split: output (stacked), input (added), summa or cannon (blocks of input, weight and output on a grid), or 1.5d
            (outputs over the grid's rows, the batch over its columns).
        takes: how its input lies: whole, rows or part; by default part after a layer that gives it, else as the model's
            input does.
        gives: how its output lies: whole, rows or part.
        blocks: matrices stacked in the weight, such as 3 for query, key and value; each is divided.
        unit: pieces are multiples of it, such as the width of an attention head.
        grid: rows of the grid of ranks; the nearest to a square by default.

    Source: Cannon 1969; van de Geijn and Watts, SUMMA, 1997; Gholami et al., Integrated Model, Batch, and Domain
    Parallelism in Training Neural Networks, SPAA 2018.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Linear,)

    blocks: int = 1
    unit: int = 1
    grid: int | None = None

    def __post_init__(self) -> None:
        one_of("the split of a dense layer", self.split, SPLITS)
        super().__post_init__()
        check_count("blocks", self.blocks)
        check_count("unit", self.unit)
        if self.grid is not None:
            check_count("grid", self.grid)
        if self.split not in ("output", "input") and {self.takes, self.gives} & {"part"}:
            raise BadInput(f"a dense layer on a grid ({self.split}) takes and gives whole, rows or grid, not part")
        if self.split != "output" and self.blocks > 1:
            raise BadInput("blocks are divided by output only")

    @property
    def pieces(self) -> object:
        return self.unit

    def make(self, name: str, module: nn.Module, context: Context, takes: str, gives: str) -> Layer:
        if self.split in _GRIDS:
            return _GRIDS[self.split](name, context, module, takes, gives, self.grid)
        return Product(name, context, module, takes, gives, self.split, self.blocks, self.unit)
