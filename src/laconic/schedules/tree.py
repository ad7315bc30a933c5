"""Binomial trees: reduce to a root, broadcast from it, or both. Where P is no power of two the last one is smaller."""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic.schedules.registry import algorithm, in_turn
from laconic.schedules.schedule import Messages, Op, Schedule


def depth(world_size: int) -> int:
    """⌈log₂ P⌉, the height of a binomial tree."""
    return (world_size - 1).bit_length()


def _one_way(reduced: bool) -> dict[str, Any]:
    """The closed forms of one tree."""
    return {
        "rounds": lambda world_size, **_: depth(world_size),
        "sent_numel": lambda world_size, numel, **_: (world_size - 1) * numel,
        "seconds": lambda world_size, nbytes, link, **_: depth(world_size) * link.exchange_s(nbytes, reduced),
    }


def check_root(root: int, world_size: int) -> None:
    """Refuse a root that is not a rank."""
    if not 0 <= root < world_size:
        raise BadInput(f"root must be a rank from 0 to {world_size - 1}, got {root}")


def _edges(world_size: int, numel: int, root: int, op: Op, towards_root: bool) -> Messages:
    """One binomial tree, its edges in the order they are used; rank numbers are rotated so that `root` is 0."""
    height = depth(world_size)
    parts = []
    for level in range(height):
        distance = 1 << level
        child = np.arange(distance, world_size, 2 * distance)
        parent = child - distance
        source, target = (child, parent) if towards_root else (parent, child)
        round_ = level if towards_root else height - 1 - level
        parts.append(
            Messages.in_round(round_, (source + root) % world_size, (target + root) % world_size, 0, numel, op)
        )
    return Messages.join(parts if towards_root else parts[::-1])


@algorithm("tree", "reduce", **_one_way(reduced=True))
def reduce_tree(world_size: int, numel: int, root: int = 0) -> Schedule:
    """Sum up a binomial tree into `root`: ⌈log₂P⌉ rounds, (P−1)·m values, time ⌈log₂P⌉(L + mG)."""
    check_root(root, world_size)
    messages = _edges(world_size, numel, root, "add", towards_root=True)
    return Schedule("reduce", "tree", world_size, numel, messages, {"root": root})


@algorithm("tree", "broadcast", **_one_way(reduced=False))
def broadcast_tree(world_size: int, numel: int, root: int = 0) -> Schedule:
    """Copy down a binomial tree from `root`: ⌈log₂P⌉ rounds, (P−1)·m values, time ⌈log₂P⌉(L + mG)."""
    check_root(root, world_size)
    messages = _edges(world_size, numel, root, "copy", towards_root=False)
    return Schedule("broadcast", "tree", world_size, numel, messages, {"root": root})


@algorithm("tree", "all_reduce", **in_turn("tree", "reduce", "broadcast"))
def tree(world_size: int, numel: int) -> Schedule:
    """Reduce up a binomial tree, then broadcast down it: few messages, for small buffers.

    Time 2 L log₂P + 2 m G log₂P; 2⌈log₂P⌉ rounds; 2(P−1)m values in all.

    >>> tree(8, 100).rounds, tree(8, 100).sent_numel
    (6, 1400)

    Source: Ben-Nun & Hoefler, Demystifying Parallel and Distributed Deep Learning, 2018, §2.5.
    """
    up = reduce_tree(world_size, numel).messages
    down = broadcast_tree(world_size, numel).messages
    return Schedule("all_reduce", "tree", world_size, numel, Messages.join([up, down.placed(rounds=depth(world_size))]))
