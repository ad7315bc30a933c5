"""Gossip graphs: mixing matrices as data. Pure: no process, no random state of its own.

Callers: `gossip`, and tests, which build whole matrices by `mixing_matrix`.

Invariant: at every step the matrix W (Wᵢⱼ: the weight that rank i gives to what rank j holds) is doubly stochastic, so
gossip never moves the mean of all workers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from laconic.registry import Registry


@dataclass(frozen=True)
class Neighbours:
    """One rank's part of one step: its row and its column of W, without the diagonal."""

    hears: dict[int, float] = field(default_factory=dict)  # Wᵢⱼ of every rank j it hears from
    tells: dict[int, float] = field(default_factory=dict)  # Wⱼᵢ of every rank j it tells


Graph = Callable[[int, int, int, int], Neighbours]
_GRAPHS: Registry[Graph] = Registry("graph")
names = _GRAPHS.names


def neighbours(graph: str, world_size: int, rank: int, step: int, seed: int = 0) -> Neighbours:
    """The neighbours of `rank` at `step`, and their weights; every rank computes its own.

    >>> neighbours("ring", 4, 0, step=0).hears
    {1: 0.3333333333333333, 3: 0.3333333333333333}
    >>> [neighbours("exponential", 8, 0, step).tells for step in range(3)]
    [{1: 0.5}, {2: 0.5}, {4: 0.5}]
    """
    return _GRAPHS.get(graph)(world_size, rank, step, seed)


def mixing_matrix(graph: str, world_size: int, step: int = 0, seed: int = 0) -> NDArray[np.float64]:
    """W at `step`: row i is how rank i mixes.

    >>> mixing_matrix("ring", 2).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    matrix = np.zeros((world_size, world_size))
    for rank in range(world_size):
        hears = neighbours(graph, world_size, rank, step, seed).hears
        for peer, weight in hears.items():
            matrix[rank, peer] = weight
        matrix[rank, rank] = 1 - sum(hears.values())
    return matrix


def contraction(graph: str, world_size: int) -> float:
    """The factor by which one step shrinks the distance to the mean: W's second-largest singular value.

    Ring: 1/3 + 2/3·cos(2π/P), in modulus the largest but one. One-peer exponential: the k-th root of that of a sweep of
    k = ⌈log₂ P⌉ steps; 0 where P is a power of two, for then the sweep ends with the exact mean. Random pairs: the root
    of the mean square, ½(P−2)/(P−1) for even P and ½ for odd.

    >>> round(contraction("ring", 8), 4), contraction("exponential", 8), round(contraction("random", 4), 4)
    (0.8047, 0.0, 0.5774)
    """
    _GRAPHS.get(graph)
    if world_size < 2:
        return 0.0
    if graph == "random":
        return float(np.sqrt(0.5 if world_size % 2 else 0.5 * (world_size - 2) / (world_size - 1)))
    hops = _hops(world_size) if graph == "exponential" else 1
    product = np.eye(world_size)
    for step in range(hops):
        product = mixing_matrix(graph, world_size, step) @ product
    second = float(np.linalg.svd(product - 1 / world_size, compute_uv=False)[0])
    return 0.0 if second < 1e-12 else second ** (1 / hops)


def acquaintances(graph: str, ranks: Sequence[int], rank: int) -> list[int]:
    """The `ranks` that `rank` may ever average with, symmetric: an asynchronous worker chooses from them.

    >>> acquaintances("ring", range(4), 0), acquaintances("ring", [0, 2, 3], 0)
    ([1, 3], [2, 3])
    """
    _GRAPHS.get(graph)
    world_size, own = len(ranks), ranks.index(rank)
    if graph == "random":
        found = set(range(world_size))
    elif graph == "ring":
        found = {(own + hop) % world_size for hop in (-1, 1)}
    else:
        hops = [1 << power for power in range(_hops(world_size))]
        found = {(own + sign * hop) % world_size for hop in hops for sign in (-1, 1)}
    return sorted(ranks[place] for place in found - {own})


def _hops(world_size: int) -> int:
    """⌈log₂ P⌉, the steps of a sweep."""
    return max(world_size - 1, 0).bit_length()


@_GRAPHS.register("ring")
def _ring(world_size: int, rank: int, step: int, seed: int) -> Neighbours:
    """Both neighbours with equal weights: 1/3 each, 1/2 where they are the same."""
    peers = sorted({(rank + 1) % world_size, (rank - 1) % world_size} - {rank})
    weights = {peer: 1 / (len(peers) + 1) for peer in peers}
    return Neighbours(weights, dict(weights))


@_GRAPHS.register("exponential")
def _exponential(world_size: int, rank: int, step: int, seed: int) -> Neighbours:
    """One peer a step, in turn 1, 2, 4, … ranks away: tells the one ahead, hears the one behind.

    Source: Ying et al., Exponential Graph is Provably Efficient for Decentralized Deep Training, NeurIPS 2021.
    """
    if world_size < 2:
        return Neighbours()
    hop = 1 << step % _hops(world_size)
    return Neighbours({(rank - hop) % world_size: 0.5}, {(rank + hop) % world_size: 0.5})


@_GRAPHS.register("random")
def _random(world_size: int, rank: int, step: int, seed: int) -> Neighbours:
    """Pairs drawn anew at every step, the same on all ranks; with an odd number one rank rests."""
    order = np.random.Generator(np.random.Philox(key=[seed, step])).permutation(world_size)
    place = int(np.flatnonzero(order == rank)[0])
    partner = place ^ 1
    if partner >= world_size:
        return Neighbours()
    weights = {int(order[partner]): 0.5}
    return Neighbours(weights, dict(weights))
