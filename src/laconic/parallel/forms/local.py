"""`Local`: locally connected layers divided by location."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import nn

from laconic.parallel.forms.space import axes
from laconic.parallel.layer import Context, Layer
from laconic.parallel.plan import DividedForm, one_of, register
from laconic.parallel.space import Locations
from laconic.workloads.models.cifar import LocallyConnected2d


@register("local")
@dataclass(frozen=True)
class Local(DividedForm):
    """A locally connected layer of which each rank holds and computes a strip of pixels.

    No weight, nor its gradient, is ever sent; of activations what `Space` sends.

    Args:
        takes: how its input lies: whole, rows or area (a strip); by default area after a layer that gives it.
        gives: how its output lies.
    """

    kinds: ClassVar[tuple[type[nn.Module], ...]] = (LocallyConnected2d,)
    part: ClassVar[str] = "area"

    takes: str | None = None
    gives: str | None = None

    def __post_init__(self) -> None:
        for value in (self.takes, self.gives):
            one_of("takes and gives", value or "whole", ("whole", "rows", "area"))

    opens = closes = True

    @property
    def pieces(self) -> object:
        return "height", None

    def make(self, name: str, module: nn.Module, context: Context, takes: str, gives: str) -> Layer:
        return Locations(name, context, module, takes, gives, axes(name, context, "height"))
