"""Particle swarm: places and speeds, drawn towards what each particle and all of them found best."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from laconic.search.history import History, Proposal, Seen, score_of
from laconic.search.methods.base import Chance, Method, need, register
from laconic.search.space import Space


@register("pso")
@dataclass(frozen=True)
class ParticleSwarm(Method):
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
        if not ended:
            return self._at(space, particle, chance.random(len(space.parameters)), chance.uniform(-0.1, 0.1))
        last = ended[-1]
        x, v = np.array(last.proposal.notes["x"]), np.array(last.proposal.notes["v"])
        own, shared = (np.array(max(group, key=score_of).proposal.notes["x"])
                       for group in (ended, [t for t in history.ended if "x" in t.proposal.notes]))  # fmt: skip
        r1, r2 = chance.random((2, len(x)))
        v = np.clip(self.inertia * v + self.own * r1 * (own - x) + self.shared * r2 * (shared - x), -0.5, 0.5)
        return self._at(space, particle, np.clip(x + v, 0.0, 1 - 1e-9), v)

    @staticmethod
    def _at(space: Space, particle: int, x: np.ndarray, v: np.ndarray | float) -> Proposal:
        speed = np.broadcast_to(v, x.shape)
        return Proposal(space.at(x.tolist()), notes={"particle": particle, "x": x.tolist(), "v": speed.tolist()})

