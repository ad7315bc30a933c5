"""`Channels`: convolutions divided by input or output channels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.errors import BadInput
from laconic.parallel.layer import Context, Layer
from laconic.parallel.plan import SplitForm, one_of, register
from laconic.parallel.product import Product


@register("channels")
@dataclass(frozen=True)
class Channels(SplitForm):
    """A convolution whose output channels (stacked) or input channels (added) are divided over all ranks.

    It sends what `Dense` does, with a pixel's channels in the place of a row's values.

    Args:
        split: output or input.
        takes: how its input lies: whole, rows or part; by default part after a layer that gives it.
        gives: how its output lies.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (nn.Conv1d, nn.Conv2d, nn.Conv3d)

    def __post_init__(self) -> None:
        one_of("the split of channels", self.split, ("output", "input"))
        super().__post_init__()

    def make(self, name: str, module: nn.Module, context: Context, takes: str, gives: str) -> Layer:
        if (groups := getattr(module, "groups", 1)) != 1:
            raise BadInput(f"{name} has {groups} groups of channels; only convolutions with one are divided so")
        return Product(name, context, module, takes, gives, self.split)
