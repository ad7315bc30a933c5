"""Genotypes of motifs: small graphs whose edges are smaller graphs, changed one edge of one motif at a time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from laconic.searching.history import History, Proposal
from laconic.searching.parameters import Choice
from laconic.searching.samplers.base import Chance, Sampler, need, need_choices, register
from laconic.searching.samplers.evolution import tournament
from laconic.searching.space import Space


def hierarchy(operations: Sequence[str], motifs: Sequence[int] = (3, 1), nodes: Sequence[int] = (4, 4)) -> Space:
    """The space of genotypes: on each level so many motifs, each a graph of so many nodes in order.

    Every pair of nodes has an edge. On the first level it is an operation, or none; above, a motif of the level below,
    or none. The parameter of an edge is named level/motif/from-to.

    >>> hierarchy(["conv", "pool"], motifs=(2, 1), nodes=(2, 2)).draw(__import__("numpy").random.default_rng(0))
    {'1/0/0-1': 'pool', '1/1/0-1': 'conv', '2/0/0-1': 'motif0'}

    Source: Liu et al., Hierarchical Representations for Efficient Architecture Search, ICLR 2018, §2.
    """
    need(len(motifs) == len(nodes) and len(motifs) > 0, "a hierarchy has motifs and nodes for each level")
    need(all(each >= 1 for each in motifs) and all(each >= 2 for each in nodes), "a motif has 2 nodes or more")
    parameters, below = {}, list(operations)
    for level, (count, size) in enumerate(zip(motifs, nodes, strict=True), start=1):
        for motif in range(count):
            for start, stop in combinations(range(size), 2):
                parameters[f"{level}/{motif}/{start}-{stop}"] = Choice([*below, "none"])
        below = [f"motif{number}" for number in range(count)]
    return Space(parameters)


@register("hierarchical")
@dataclass(frozen=True)
class Hierarchical(Sampler):
    """Tournaments among all trials; a change is of one level, then one of its motifs, then one of its edges.

    So all levels change as often, however many edges they have. Parameters whose names have no "/" are a level each.
    Nobody leaves the population, and nobody waits.

    Source: Liu et al., Hierarchical Representations for Efficient Architecture Search, ICLR 2018, §3.

    Attributes:
        start: genotypes drawn by chance first.
        sample: the share of all trials that a parent is the best of.
    """

    start: int = 20
    sample: float = 0.05

    def __post_init__(self) -> None:
        need(self.start >= 1, f"hierarchical starts with 1 genotype or more, got {self.start}")
        need(0 < self.sample <= 1, f"a sample is a share above 0 and up to 1, got {self.sample}")

    def check(self, space: Space) -> None:
        need_choices(self, space)

    def propose(self, space: Space, history: History, chance: Chance) -> Proposal:
        if len(history) < self.start or not history.ended:
            return Proposal(space.draw(chance))
        parent = tournament(history.ended, max(2, round(self.sample * len(history.ended))), chance)
        names, depth = list(parent.point), 0
        while len(names) > 1:
            parts = sorted({tuple(name.split("/")[: depth + 1]) for name in names})
            chosen = parts[int(chance.integers(len(parts)))]
            names = [name for name in names if tuple(name.split("/")[: depth + 1]) == chosen]
            depth += 1
        return Proposal(space.moved(parent.point, names, chance))
