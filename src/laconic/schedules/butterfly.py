"""Recursive doubling, and how worlds that are not a power of two are folded into one that is."""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic.schedules.link import Link
from laconic.schedules.registry import algorithm
from laconic.schedules.schedule import Messages, Schedule, core_size


def with_surplus(world_size: int, numel: int, core: list[Messages]) -> Messages:
    """Rounds of the core ranks; before them each surplus rank adds its buffer to one, after them it gets the result."""
    size = core_size(world_size)
    surplus = np.arange(size, world_size)
    fold = Messages.in_round(0, surplus, surplus - size, 0, numel, "add")
    unfold = Messages.in_round(0, surplus - size, surplus, 0, numel, "copy")
    parts = [part.placed(rounds=fold.rounds + number) for number, part in enumerate(core)]
    return Messages.join([fold, *parts, unfold.placed(rounds=fold.rounds + len(core))])


def fold_seconds(world_size: int, nbytes: float, link: Link) -> float:
    """Time of the two rounds of the surplus ranks; nothing for powers of two."""
    if core_size(world_size) == world_size:
        return 0.0
    return link.exchange_s(nbytes, reduced=True) + link.exchange_s(nbytes, reduced=False)


def _rounds(world_size: int, **_: Any) -> int:
    core = core_size(world_size)
    return core.bit_length() - 1 + 2 * (core < world_size)


def _sent(world_size: int, numel: int, **_: Any) -> int:
    core = core_size(world_size)
    return (core * (core.bit_length() - 1) + 2 * (world_size - core)) * numel


def _seconds(world_size: int, nbytes: float, link: Link, **_: Any) -> float:
    levels = core_size(world_size).bit_length() - 1
    return levels * link.exchange_s(nbytes, reduced=True) + fold_seconds(world_size, nbytes, link)


@algorithm("butterfly", "all_reduce", rounds=_rounds, sent_numel=_sent, seconds=_seconds)
def butterfly(world_size: int, numel: int) -> Schedule:
    """Exchange the whole buffer with a partner twice as far each round: fewest rounds, for small buffers.

    Time L log₂P + m G log₂P for powers of two, 2(L + mG) more otherwise; p·log₂p + 2(P−p) times m values, p being the
    largest power of two not above P.

    >>> butterfly(8, 100).rounds, butterfly(8, 100).sent_numel
    (3, 2400)

    Source: Thakur et al., Optimization of Collective Communication Operations in MPICH, IJHPCA 2005, §4.5.
    """
    ranks = np.arange(core_size(world_size))
    distances = [1 << level for level in range(len(ranks).bit_length() - 1)]
    rounds = [Messages.in_round(0, ranks, ranks ^ distance, 0, numel, "add") for distance in distances]
    return Schedule("all_reduce", "butterfly", world_size, numel, with_surplus(world_size, numel, rounds))
