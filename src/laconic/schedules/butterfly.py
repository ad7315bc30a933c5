"""Recursive doubling: in round k every rank exchanges its whole buffer with the rank 2ᵏ away.

The fewest rounds there are; every round carries everything, so it is for small buffers. Worlds that are not a power of
two fold the surplus ranks into the first ones before, and hand them the result after.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic.schedules.link import Link
from laconic.schedules.registry import algorithm
from laconic.schedules.schedule import Messages, Schedule


def core_size(world_size: int) -> int:
    """The largest power of two that is not above P: the ranks that do the exchange."""
    return 1 << (world_size.bit_length() - 1)


def fold(world_size: int, numel: int) -> Messages:
    """One round: each surplus rank adds its buffer into a core rank."""
    core = core_size(world_size)
    surplus = np.arange(core, world_size)
    return Messages.in_round(0, surplus, surplus - core, 0, numel, "add")


def unfold(world_size: int, numel: int) -> Messages:
    """One round: each surplus rank gets the result back."""
    core = core_size(world_size)
    surplus = np.arange(core, world_size)
    return Messages.in_round(0, surplus - core, surplus, 0, numel, "copy")


def fold_seconds(world_size: int, nbytes: float, link: Link) -> float:
    """Time of fold and unfold, nothing for powers of two."""
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
    core = core_size(world_size)
    before = fold(world_size, numel)
    parts = [before]
    number = before.rounds
    ranks = np.arange(core)
    for level in range(core.bit_length() - 1):
        parts.append(Messages.in_round(number, ranks, ranks ^ (1 << level), 0, numel, "add"))
        number += 1
    parts.append(unfold(world_size, numel).placed(rounds=number))
    return Schedule("all_reduce", "butterfly", world_size, numel, Messages.join(parts))
