"""A scrambled Sobol sequence: points that leave no large hole."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from laconic.searching.history import History, Proposal
from laconic.searching.samplers.base import Chance, Sampler, need, register
from laconic.searching.space import Space

MOST = 21201  # dimensions that SciPy has direction numbers for


@register("sobol")
@dataclass(frozen=True)
class Sobol(Sampler):
    """The n-th trial is the n-th point of one scrambled sequence.

    Source: Sobol, USSR Comput. Math. Math. Phys. 7(4), 1967; scrambling by Owen.
    """

    scramble: int = 0

    def check(self, space: Space) -> None:
        need(len(space.parameters) <= MOST, f"sobol has at most {MOST} parameters, got {len(space.parameters)}")

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        return Proposal(space.at(_sequence(len(space.parameters), self.scramble, _doubled(len(history)))[len(history)]))


def _doubled(number: int) -> int:
    """A power of two above `number`: sequences are drawn by such."""
    return max(64, 1 << number.bit_length())


@lru_cache(maxsize=4)
def _sequence(parameters: int, seed: int, count: int) -> list[list[float]]:
    from scipy.stats import qmc

    places = qmc.Sobol(parameters, scramble=True, seed=seed).random(count)
    return [[float(place) for place in row] for row in places.clip(0, 1 - 1e-12)]
