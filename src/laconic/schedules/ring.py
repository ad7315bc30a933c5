"""The ring (pipeline): every rank talks to its two neighbours only, and each chunk goes round.

The least bytes per rank there can be, in 2(P−1) rounds: for large buffers and few ranks. With a segment size, a chunk
travels as several messages, so that adding the first overlaps with receiving the next.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic.schedules.link import Link
from laconic.schedules.registry import algorithm, in_turn
from laconic.schedules.schedule import Messages, Op, Schedule, bounds


def _once(reduced: bool) -> dict[str, Any]:
    """The closed forms of going round once."""

    def seconds(
        world_size: int, nbytes: float, link: Link, segment: int | None = None, itemsize: int = 4, **_: Any
    ) -> float:
        chunk = nbytes / world_size
        pieces = 1 if segment is None else max(1, -(-int(chunk) // (segment * itemsize)))
        return (world_size - 1) * link.burst_s(pieces, chunk / pieces, reduced)

    return {
        "rounds": lambda world_size, **_: world_size - 1,
        "sent_numel": lambda world_size, numel, **_: (world_size - 1) * numel,
        "seconds": seconds,
    }


def _once_round(world_size: int, numel: int, first_chunk: int, op: Op, segment: int | None) -> Messages:
    """P−1 rounds; in round s rank r sends chunk r + first_chunk − s to rank r+1."""
    if segment is not None and segment < 1:
        raise BadInput(f"ring: segment must be at least 1 value, got {segment}")
    ranks = np.arange(world_size)
    edges = bounds(numel, world_size)
    parts = []
    for step in range(world_size - 1):
        chunk = (ranks + first_chunk - step) % world_size
        start, stop = edges[chunk], edges[chunk + 1]
        longest = int((stop - start).max())
        for skip in range(0, longest, segment or max(1, longest)):
            end = stop if segment is None else np.minimum(stop, start + skip + segment)
            parts.append(Messages.in_round(step, ranks, (ranks + 1) % world_size, start + skip, end, op))
    return Messages.join(parts)


@algorithm("ring", "reduce_scatter", **_once(reduced=True), dense=True)
def reduce_scatter_ring(world_size: int, numel: int, segment: int | None = None) -> Schedule:
    """Each chunk is summed on its way round and ends at its owner: P−1 rounds, (P−1)m values, time (P−1)(L + mG/P)."""
    messages = _once_round(world_size, numel, -1, "add", segment)
    return Schedule("reduce_scatter", "ring", world_size, numel, messages, {"segment": segment})


@algorithm("ring", "all_gather", **_once(reduced=False), dense=True)
def all_gather_ring(world_size: int, numel: int, segment: int | None = None) -> Schedule:
    """Each rank's chunk goes once round: P−1 rounds, (P−1)m values, time (P−1)(L + mG/P)."""
    messages = _once_round(world_size, numel, 0, "copy", segment)
    return Schedule("all_gather", "ring", world_size, numel, messages, {"segment": segment})


@algorithm("ring", "all_reduce", **in_turn("ring", "reduce_scatter", "all_gather"), dense=True)
def ring(world_size: int, numel: int, segment: int | None = None) -> Schedule:
    """Pass chunks round a ring, adding, then round again, copying: least bytes, for large buffers and few ranks.

    Time 2 L (P−1) + 2 m G (P−1)/P; 2(P−1) rounds; 2(P−1)m values in all.

    Args:
        segment: the most values in one message; None sends each chunk whole.

    >>> ring(4, 1000).rounds, ring(4, 1000).sent_numel
    (6, 6000)

    Source: Patarasuk & Yuan, Bandwidth optimal all-reduce algorithms for clusters of workstations, JPDC 2009.
    """
    scatter = reduce_scatter_ring(world_size, numel, segment).messages
    gather = all_gather_ring(world_size, numel, segment).messages
    messages = Messages.join([scatter, gather.placed(rounds=world_size - 1)])
    return Schedule("all_reduce", "ring", world_size, numel, messages, {"segment": segment})
