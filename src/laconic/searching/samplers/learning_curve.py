"""Stop by prediction of the curve: another method's points, ended when their curve cannot reach the best."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.searching.history import History, Proposal
from laconic.searching.samplers.base import Chance, Sampler, build, need, register
from laconic.searching.space import Space


@register("learning_curve")
@dataclass(frozen=True)
class LearningCurve(Sampler):
    """Points of another method, with the pruner `learning_curve(end)`: see `pruners.py`.

    Source: Domhan, Springenberg, Hutter, IJCAI 2015.

    Attributes:
        end: the step that trials end at.
        chance: a trial is stopped when it reaches the best with less than this chance.
        points: the method that chooses the points.
    """

    end: int = 20
    chance: float = 0.05
    points: str = "random"

    def __post_init__(self) -> None:
        other = build(self.points)
        need(not isinstance(other, LearningCurve) and not other.repeats and not other.inherits,
             f"learning_curve takes its points from a method whose trials stand alone, such as tpe, got {self.points}")

    @property
    def rule(self) -> str:
        return f"learning_curve({self.end}, {self.chance})"

    def check(self, space: Space) -> None:
        build(self.points).check(space)

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal | None:
        return build(self.points).propose(space, history, chance)
