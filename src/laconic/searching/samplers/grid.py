"""Every combination of values, in order."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.searching.history import History, Proposal
from laconic.searching.samplers.base import Chance, Sampler, need, register
from laconic.searching.space import Space


@register("grid")
@dataclass(frozen=True)
class Grid(Sampler):
    """All points of the space, continuous parameters at `levels` values; ends when they are tried."""

    levels: int = 5

    def __post_init__(self) -> None:
        need(self.levels >= 1, f"grid has 1 level or more, got {self.levels}")

    def check(self, space: Space) -> None:
        next(space.points(self.levels))

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal | None:
        return next((Proposal(point) for point in space.points(self.levels) if not history.knows(point)), None)
