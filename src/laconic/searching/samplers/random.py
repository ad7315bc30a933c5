"""Every trial by chance: the base that any other method has to beat."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.searching.history import History, Proposal
from laconic.searching.samplers.base import Chance, Sampler, register
from laconic.searching.space import Space


@register("random")
@dataclass(frozen=True)
class Random(Sampler):
    """Points by chance, each as likely.

    Source: Bergstra, Bengio, Random Search for Hyper-Parameter Optimization, JMLR 13, 2012.
    """

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        return Proposal(space.draw(chance))
