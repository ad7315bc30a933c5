"""Particle swarm: places and speeds, drawn towards what each particle and all of them found best."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.searching.history import History, Proposal, Seen, score_of
from laconic.searching.samplers.base import Chance, Sampler, need, register
from laconic.searching.space import Space


@register("pso")
@dataclass(frozen=True)
class ParticleSwarm(Sampler):
    """v ← inertia·v + own·r₁·(its best − x) + shared·r₂·(the best of all − x); x ← x + v, in places of [0, 1).

    A particle moves as soon as its last trial ended, so that nobody waits for the others.

    Source: Lorenzo et al., Particle Swarm Optimization for Hyper-Parameter Selection in Deep Neural Networks,
    GECCO 2017.

    Attributes:
        particles: how many.
        inertia: share of the speed that is kept.
        own: pull of the particle's own best.
        shared: pull of the best of all.
    """

    draws: ClassVar[int] = 3  # a particle that stands still does not move by asking again
    particles: int = 10
    inertia: float = 0.7
    own: float = 1.4
    shared: float = 1.4

    def __post_init__(self) -> None:
        need(self.particles >= 1, f"pso has 1 particle or more, got {self.particles}")

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        mine: dict[int, list[Seen]] = {number: [] for number in range(self.particles)}
        for trial in history.trials.values():
            mine.setdefault(int(trial.proposal.notes.get("particle", -1)), []).append(trial)
        busy = {int(trial.proposal.notes.get("particle", -1)) for trial in history.running}
        free = [number for number in range(self.particles) if number not in busy] or list(range(self.particles))
        particle = min(free, key=lambda number: (len(mine[number]), number))
        ended = [trial for trial in mine[particle] if trial.ended]
        names = list(space.parameters)
        if not ended:
            return self._at(space, particle, chance.random(len(names)), chance.uniform(-0.1, 0.1, 1).repeat(len(names)))
        x, v = _noted(ended[-1], "x", names, 0.5), _noted(ended[-1], "v", names, 0.0)
        own, shared = (_noted(max(group, key=score_of), "x", names, 0.5)
                       for group in (ended, [t for t in history.ended if "x" in t.proposal.notes]))  # fmt: skip
        r1, r2 = chance.random((2, len(x)))
        v = np.clip(self.inertia * v + self.own * r1 * (own - x) + self.shared * r2 * (shared - x), -0.5, 0.5)
        return self._at(space, particle, np.clip(x + v, 0.0, 1 - 1e-9), v)

    @staticmethod
    def _at(space: Space, particle: int, x: np.ndarray, v: np.ndarray) -> Proposal:
        places, speeds = (dict(zip(space.parameters, each.tolist(), strict=True)) for each in (x, v))
        return Proposal(space.at(x.tolist()), notes={"particle": particle, "x": places, "v": speeds})


def _noted(trial: Seen, what: str, names: Sequence[str], missing: float) -> np.ndarray:
    """A place or speed of a particle; some parameters may have been unknown then."""
    noted = trial.proposal.notes[what]
    return np.array([noted.get(name, missing) for name in names])
