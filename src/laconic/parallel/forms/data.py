"""`Data`: layers that are whole on every rank, each of which brings rows of the batch of its own."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.errors import BadInput
from laconic.parallel.boundary import Boundary
from laconic.parallel.plan import Form, register


@register("data")
@dataclass(frozen=True)
class Data(Form):
    """Data parallelism inside a divided model: gradients are the mean over ranks, weighted by their rows.

    With it in a plan, every rank brings rows of its own, and all layers that are not divided are treated so.

    Args:
        shares: the rows that ranks bring, in proportion, such as (3, 1); equal by default.
        codec: of the gradients; exact by default.
        ask: ranks tell each other at every forward how many rows they bring, any number; 8 bytes a rank.
    """

    shares: tuple[int, ...] | None = None
    codec: str = "none"
    ask: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.shares, list):
            object.__setattr__(self, "shares", tuple(self.shares))
        if self.codec is None:  # `none` in a plan's text
            object.__setattr__(self, "codec", "none")
        given = self.shares
        whole = isinstance(given, tuple) and all(isinstance(each, int) and each > 0 for each in given)
        if given is not None and not (given and whole):
            raise BadInput(f"shares are whole numbers from 1, one a rank, got {self.shares!r}")
        if self.ask and self.shares is not None:
            raise BadInput("ranks that ask for each other's rows need no shares")
        Boundary.of(self.codec)
