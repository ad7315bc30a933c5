"""Training without gradients: networks whose weights are their parent's with noise (neuro-evolution)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.searching.history import History, Proposal, score_of
from laconic.searching.samplers.base import Chance, Sampler, need, register
from laconic.searching.space import Space


@register("gradient_free")
@dataclass(frozen=True)
class GradientFree(Sampler):
    """A trial adds noise to the weights of one of the best `elite` trials, and only evaluates.

    The objective draws the noise from `trial.seed`, and how strong it is can be a parameter of the space: with chance
    `explore` a child's parameters are moved too.

    Source: Such et al., Deep Neuroevolution, 2017 (truncation selection); survey §6.5.

    Attributes:
        start: networks drawn by chance first.
        elite: how many of the best can be parents.
        explore: the chance that a child's parameters are moved.
    """

    inherits: ClassVar[bool] = True
    trains: ClassVar[bool] = False
    repeats: ClassVar[bool] = True
    start: int = 20
    elite: int = 5
    explore: float = 0.2

    def __post_init__(self) -> None:
        need(self.start >= 1 and self.elite >= 1, f"gradient_free has 1 or more to start and as elite, got {self}")
        need(0 <= self.explore <= 1, f"gradient_free explores with a chance from 0 to 1, got {self.explore}")

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        if len(history) < self.start or not history.ended:
            return Proposal(space.draw(chance))
        elite = sorted(history.ended, key=score_of)[-self.elite :]
        parent = elite[int(chance.integers(len(elite)))]
        moves = list(parent.point) if chance.random() < self.explore else []
        return Proposal(space.moved(parent.point, moves, chance), parent.number)
