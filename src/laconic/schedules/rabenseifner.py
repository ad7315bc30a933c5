"""Rabenseifner's all-reduce: as few bytes as the ring in only 2·log₂P rounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic.schedules.butterfly import fold_seconds, with_surplus
from laconic.schedules.link import Link
from laconic.schedules.registry import algorithm
from laconic.schedules.schedule import Messages, Schedule, bounds, core_size


def _rounds(world_size: int, **_: Any) -> int:
    core = core_size(world_size)
    return 2 * (core.bit_length() - 1) + 2 * (core < world_size)


def _sent(world_size: int, numel: int, **_: Any) -> int:
    core = core_size(world_size)
    return (2 * (core - 1) + 2 * (world_size - core)) * numel


def _seconds(world_size: int, nbytes: float, link: Link, **_: Any) -> float:
    levels = range(1, core_size(world_size).bit_length())
    halving = sum(link.exchange_s(nbytes / 2**k, reduced=True) for k in levels)
    doubling = sum(link.exchange_s(nbytes / 2**k, reduced=False) for k in levels)
    return halving + doubling + fold_seconds(world_size, nbytes, link)


@algorithm("rabenseifner", "all_reduce", rounds=_rounds, sent_numel=_sent, seconds=_seconds)
def rabenseifner(world_size: int, numel: int) -> Schedule:
    """Reduce-scatter by recursive halving, all-gather by recursive doubling: least bytes in few rounds, for many ranks.

    Time 2 L log₂P + 2 m G (P−1)/P for powers of two; otherwise surplus ranks are folded in first, for 2(L + mG) more.
    2(p−1) + 2(P−p) times m values, where p is the largest power of two not above P.

    >>> rabenseifner(8, 800).rounds, rabenseifner(8, 800).sent_numel
    (6, 11200)

    Source: Rabenseifner, Optimization of Collective Reduction Operations, ICCS 2004.
    """
    core = core_size(world_size)
    edges = bounds(numel, core)
    ranks = np.arange(core)
    rounds = []
    distances = [core >> (level + 1) for level in range(core.bit_length() - 1)]

    # reduce-scatter: with the partner at distance d, keep the half of the group of 2d chunks that holds my own
    for distance in distances:
        partner = ranks ^ distance
        first = partner & ~(distance - 1)  # the first chunk of the partner's half
        rounds.append(Messages.in_round(0, ranks, partner, edges[first], edges[first + distance], "add"))

    # all-gather: the same exchanges backwards, now sending the half I own
    for distance in reversed(distances):
        first = ranks & ~(distance - 1)
        rounds.append(Messages.in_round(0, ranks, ranks ^ distance, edges[first], edges[first + distance], "copy"))

    return Schedule("all_reduce", "rabenseifner", world_size, numel, with_surplus(world_size, numel, rounds))
