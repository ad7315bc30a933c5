"""A mode with a defect, which the ranks of a chaos job train by: what a suite that looks for such must find."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

from benchmarks.chaos import program
from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import REGISTRY, Agreement, Mode, Setup
from laconic.errors import PeerLost
from laconic.exchange.collectives import barrier


@dataclass(frozen=True)
class Planted(Mode):
    """Ranks that train apart and meet in `finish`, but for the defect.

    Args:
        defect: honest, without one; hang, wrong or untyped when a peer is lost; apart: different weights on every rank.
    """

    defect: str = "honest"

    name: ClassVar[str] = "planted"
    summary: ClassVar[str] = "a mode with a defect"
    same_weights: ClassVar[bool] = False

    @property
    def no_codec(self) -> str:
        return "it sends nothing"

    def outlives(self, rank: int, world_size: int) -> bool:
        return self.defect == "apart"

    def install(self, setup: Setup) -> Agreement:
        return PlantedAgreement(self, setup)


class PlantedAgreement(OwnWeights):
    """Planted at work."""

    def __init__(self, mode: Planted, setup: Setup) -> None:
        super().__init__(setup)
        self.mode = mode

    def after_step(self) -> None:
        self.settle()

    def finish(self) -> None:
        try:
            barrier(group=self.world)
        except PeerLost:
            if self.mode.defect == "honest":
                raise
            while self.mode.defect == "hang":
                time.sleep(0.1)
            if self.mode.defect == "untyped":
                raise KeyError("peer") from None
        self.weights.values.fill_(self.world.rank if self.mode.defect == "apart" else 1.0)


def run(values: dict[str, Any]) -> None:
    """One process, which knows the mode."""
    REGISTRY.add(Planted.name, Planted)
    program.run(values)
