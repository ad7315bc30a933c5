"""Everyone to everyone: a chunk's owner hears from all ranks at once, then tells all at once.

Two rounds whatever P, so a value is quantised twice whatever P, which is why compressed all-reduces prefer it. In
step k rank r sends to rank r+k, so that no receiver is hit by two senders at the same moment.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic.schedules.link import Link
from laconic.schedules.registry import algorithm, in_turn
from laconic.schedules.schedule import Ints, Messages, Op, Schedule, bounds
from laconic.schedules.tree import check_root


def _one_round(reduced: bool, share: bool) -> dict[str, Any]:
    """The closed forms of one round in which ranks send a share of the buffer to each other, or all of it."""

    def seconds(world_size: int, nbytes: float, link: Link, **_: Any) -> float:
        return link.burst_s(world_size - 1, nbytes / world_size if share else nbytes, reduced)

    return {
        "rounds": lambda world_size, **_: int(world_size > 1),
        "sent_numel": lambda world_size, numel, **_: (world_size - 1) * numel,
        "seconds": seconds,
    }


def _everyone(world_size: int, numel: int, op: Op, chunk_of: str) -> Messages:
    """One round in which rank r sends to r+1, r+2, …: the receiver's chunk, or its own."""
    edges = bounds(numel, world_size)
    ranks = np.arange(world_size)
    parts = []
    for step in range(1, world_size):
        peer = (ranks + step) % world_size
        chunk: Ints = peer if chunk_of == "receiver" else ranks
        parts.append(Messages.in_round(0, ranks, peer, edges[chunk], edges[chunk + 1], op))
    return Messages.join(parts)


@algorithm("direct", "reduce_scatter", **_one_round(reduced=True, share=True), dense=True)
def reduce_scatter_direct(world_size: int, numel: int) -> Schedule:
    """Every rank sends each chunk straight to its owner: one round, (P−1)m values, time L + mG(P−1)/P."""
    messages = _everyone(world_size, numel, "add", "receiver")
    return Schedule("reduce_scatter", "direct", world_size, numel, messages)


@algorithm("direct", "all_gather", **_one_round(reduced=False, share=True), dense=True)
def all_gather_direct(world_size: int, numel: int) -> Schedule:
    """Every owner sends its chunk straight to all: one round, (P−1)m values, time L + mG(P−1)/P."""
    messages = _everyone(world_size, numel, "copy", "sender")
    return Schedule("all_gather", "direct", world_size, numel, messages)


@algorithm("direct", "all_reduce", **in_turn("direct", "reduce_scatter", "all_gather"), dense=True)
def direct(world_size: int, numel: int) -> Schedule:
    """Reduce-scatter and all-gather by direct sends: two rounds whatever P, least bytes, many messages.

    Time 2 L + 2 m G (P−1)/P; 2 rounds; 2(P−1)m values in all.

    >>> direct(4, 1000).rounds, direct(4, 1000).sent_numel
    (2, 6000)
    """
    scatter = reduce_scatter_direct(world_size, numel).messages
    gather = all_gather_direct(world_size, numel).messages
    messages = Messages.join([scatter, gather.placed(rounds=scatter.rounds)])
    return Schedule("all_reduce", "direct", world_size, numel, messages)


@algorithm("direct", "reduce", **_one_round(reduced=True, share=False))
def reduce_direct(world_size: int, numel: int, root: int = 0) -> Schedule:
    """Everyone sends to `root` at once: one round, (P−1)m values, time L + (P−1)mG."""
    check_root(root, world_size)
    others = (root + np.arange(1, world_size)) % world_size
    return Schedule(
        "reduce", "direct", world_size, numel, Messages.in_round(0, others, root, 0, numel, "add"), {"root": root}
    )


@algorithm("direct", "broadcast", **_one_round(reduced=False, share=False))
def broadcast_direct(world_size: int, numel: int, root: int = 0) -> Schedule:
    """`root` sends to everyone: one round, (P−1)m values, time L + (P−1)mG."""
    check_root(root, world_size)
    others = (root + np.arange(1, world_size)) % world_size
    return Schedule(
        "broadcast", "direct", world_size, numel, Messages.in_round(0, root, others, 0, numel, "copy"), {"root": root}
    )


@algorithm("direct", "all_to_all", **_one_round(reduced=False, share=True), dense=True)
def all_to_all_direct(world_size: int, numel: int) -> Schedule:
    """Block j of rank i changes places with block i of rank j: one round, (P−1)m values, time L + mG(P−1)/P.

    `numel` must be a multiple of P, as in torch's all_to_all_single with equal splits.
    """
    if numel % world_size:
        raise BadInput(f"all_to_all: numel must be a multiple of the world size {world_size}, got {numel}")
    block = numel // world_size
    ranks = np.arange(world_size)
    parts = []
    for step in range(1, world_size):
        peer = (ranks + step) % world_size
        parts.append(Messages.in_round(0, ranks, peer, peer * block, (peer + 1) * block, "copy", at=ranks * block))
    return Schedule("all_to_all", "direct", world_size, numel, Messages.join(parts))
