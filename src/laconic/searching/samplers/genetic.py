"""A genetic algorithm: two parents, uniform crossover, mutation."""

from __future__ import annotations

from dataclasses import dataclass

from laconic.searching.history import History, Proposal, score_of
from laconic.searching.parameters import Parameter, Value
from laconic.searching.samplers.base import Chance, Sampler, need, register
from laconic.searching.samplers.evolution import tournament
from laconic.searching.space import Space


@register("genetic")
@dataclass(frozen=True)
class Genetic(Sampler):
    """A child takes each parameter from one of two parents, and some of them are then moved.

    Parents win tournaments of two among the best `population` trials.

    Source: Holland, Adaptation in Natural and Artificial Systems, 1975; survey §6.5.
    Differs: steady state, so that no worker waits for a generation.

    Attributes:
        population: how many trials can be parents.
        mutation: the chance of each parameter to be moved; 0 is one over their number.
    """

    population: int = 20
    mutation: float = 0.0

    def __post_init__(self) -> None:
        need(self.population >= 2, f"genetic: a population has 2 or more, got {self.population}")
        need(0 <= self.mutation <= 1, f"genetic: mutation is from 0 to 1, got {self.mutation}")

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        if len(history) < self.population or len(history.ended) < 2:
            return Proposal(space.draw(chance))
        elite = sorted(history.ended, key=score_of)[-self.population :]
        mother, father = (tournament(elite, 2, chance).point for _ in range(2))
        rate = self.mutation or 1 / len(space.parameters)

        def choose(name: str, each: Parameter) -> Value:
            first, second = (mother, father) if chance.random() < 0.5 else (father, mother)
            value: Value = first[name] if name in first else second[name] if name in second else each.draw(chance)
            return each.moved(value, chance) if chance.random() < rate else value

        return Proposal(space.build(choose))
