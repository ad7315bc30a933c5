"""Talking to some, not to all: one round over a graph, and the rounds gossip is made of.

Each rank ends with the sum of its own buffer and those of the ranks that point at it; whoever averages divides by
their number. `sources` of the schedule says whose values each rank holds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic.schedules.link import Link
from laconic.schedules.registry import algorithm
from laconic.schedules.schedule import Messages, Schedule
from laconic.schedules.tree import depth

Graph = Mapping[int, Sequence[int]] | Sequence[Sequence[int]]


def ring_graph(world_size: int) -> list[list[int]]:
    """Each rank points at its two neighbours on a ring.

    >>> ring_graph(4)
    [[1, 3], [0, 2], [1, 3], [0, 2]]
    """
    return [sorted({(r - 1) % world_size, (r + 1) % world_size} - {r}) for r in range(world_size)]


def exponential_graph(world_size: int) -> list[list[int]]:
    """Each rank points at the ranks 1, 2, 4, … further on: everyone is reached in O(log P) rounds."""
    return [
        sorted({(r + (1 << k)) % world_size for k in range(depth(world_size))} - {r}) for r in range(world_size)
    ]


def _targets(world_size: int, graph: Graph | None) -> list[list[int]]:
    """graph as a list: the ranks each rank sends to; on a ring when None."""
    if graph is None:
        return ring_graph(world_size)
    if isinstance(graph, Mapping):
        unknown = [r for r in graph if not 0 <= r < world_size]
        if unknown:
            raise BadInput(f"neighbourhood: rank {unknown[0]} is not in 0…{world_size - 1}")
        rows = [list(graph.get(r, ())) for r in range(world_size)]
    else:
        rows = [list(row) for row in graph]
    if len(rows) != world_size:
        raise BadInput(f"neighbourhood: the graph has {len(rows)} ranks, the world {world_size}")
    for rank, row in enumerate(rows):
        bad = [peer for peer in row if not 0 <= peer < world_size or peer == rank]
        if bad or len(set(row)) != len(row):
            raise BadInput(f"neighbourhood: rank {rank} must name other ranks, each once; got {row}")
    return rows


def _degrees(world_size: int, graph: Graph | None) -> list[int]:
    return [len(row) for row in _targets(world_size, graph)]


def _seconds(world_size: int, nbytes: float, link: Link, graph: Graph | None = None, **_: Any) -> float:
    return link.burst_s(max(_degrees(world_size, graph)), nbytes, reduced=True)


@algorithm(
    "graph",
    "neighbourhood",
    rounds=lambda world_size, graph=None, **_: 1 if any(_degrees(world_size, graph)) else 0,
    sent_numel=lambda world_size, numel, graph=None, **_: sum(_degrees(world_size, graph)) * numel,
    seconds=_seconds,
)
def neighbourhood(world_size: int, numel: int, graph: Graph | None = None) -> Schedule:
    """One round over a directed graph: every rank adds the buffers of those that point at it.

    Time L + d·mG for the largest degree d; one round; |edges|·m values.

    Args:
        graph: graph[r] lists the ranks that r sends to; the two ring neighbours when None.

    >>> neighbourhood(4, 10).sources
    ((0, 1, 3), (0, 1, 2), (1, 2, 3), (0, 2, 3))

    Source: Lian et al., Can Decentralized Algorithms Outperform Centralized Algorithms?, NeurIPS 2017 (D-PSGD).
    """
    rows = _targets(world_size, graph)
    src = [rank for rank, row in enumerate(rows) for _ in row]
    dst = [peer for row in rows for peer in row]
    messages = Messages.in_round(0, src, dst, 0, numel, "add") if src else Messages.empty()
    heard = [{rank} for rank in range(world_size)]
    for rank, row in enumerate(rows):
        for peer in row:
            heard[peer].add(rank)
    sources = tuple(tuple(sorted(each)) for each in heard)
    frozen = tuple(tuple(row) for row in rows)
    return Schedule("neighbourhood", "graph", world_size, numel, messages, {"graph": frozen}, sources)


def random_pairs(world_size: int, numel: int, round: int, seed: int = 0) -> Schedule:
    """A gossip round of random pairs: each rank swaps with one other (one rank rests when P is odd).

    Every rank computes the same pairs from (seed, round), so nothing needs to be agreed on.

    >>> random_pairs(4, 10, round=0).sources == random_pairs(4, 10, round=0).sources
    True

    Source: Boyd et al., Randomized gossip algorithms, IEEE Trans. Inf. Theory 2006; Jin et al. 2016.
    """
    order = np.random.default_rng([seed, round]).permutation(world_size)
    graph: list[list[int]] = [[] for _ in range(world_size)]
    for a, b in zip(order[0::2].tolist(), order[1::2].tolist(), strict=False):
        graph[a], graph[b] = [b], [a]
    return neighbourhood(world_size, numel, graph)


def one_peer_exponential(world_size: int, numel: int, round: int) -> Schedule:
    """A gossip round of the one-peer exponential graph: in round t rank r sends to r + 2^(t mod ⌈log₂P⌉).

    For a power of two, ⌈log₂P⌉ such rounds in a row average exactly.

    >>> one_peer_exponential(4, 10, round=1).sources
    ((0, 2), (1, 3), (0, 2), (1, 3))

    Source: Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 2021.
    """
    if world_size == 1:
        return neighbourhood(1, numel, [[]])
    hop = 1 << (round % depth(world_size))
    return neighbourhood(world_size, numel, [[(rank + hop) % world_size] for rank in range(world_size)])
