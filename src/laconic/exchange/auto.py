"""Which algorithm is cheapest here: from the link's profile, the engine's own all-reduce among the candidates.

Callers: `collectives.py` and the compressed exchanges, for algorithm="auto". Every rank holds the same profile, so
every rank picks the same.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from laconic.exchange.coded import Channel, CodedExchange, MessagePool
from laconic.exchange.coded_plan import GATHER
from laconic.exchange.sparse_choice import MERGE_S, SPARSE, UNPACK_S, cheapest_sparse, counts, is_sparse
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.transports.base import Steps, Timings, Transport
from laconic.transports.profile import Profile
from laconic.transports.world import World

NATIVE = "native"
# An ordinary network under gloo, for choosing between one round and two before anything was measured.
GUESS = Link(latency_s=1e-3, s_per_byte=8e-9)
COARSE = 1 / 6
SURELY = 0.9  # of the time of what is known to work: patterns are only modelled
ROUND_S = 1e-3  # a second round waits for the slowest rank once more, which no link's parameters tell
MESSAGE_S = 4e-4  # processor time of an exchange beside its kernels (python -m benchmarks profile-bucket --numel 4096)
LEAST_NBYTES, MOST_NBYTES = 1 << 16, 1 << 22  # of a message: below, the processor is busy with messages alone


def candidates(world: World) -> list[str]:
    """The all-reduce algorithms this world can run, `native` last when its engine has one."""
    names = registry.names("all_reduce")
    return [*names, NATIVE] if world.transport.has_native else names


def profile_of(world: World) -> Profile:
    """The world's profile; measured now, by all ranks together, when there is none yet."""
    if world.profile is None:
        from laconic.transports.probe import probe

        world.profile = probe(world.transport, quick=True)
    return world.profile


def pick(world: World, nbytes: int) -> str:
    """The algorithm with the least predicted time for an all-reduce of `nbytes`."""
    if world.world_size == 1:
        return "tree"
    return profile_of(world).cheapest(world.world_size, nbytes, candidates(world))


def message_nbytes(link: Link) -> int:
    """What a message should carry on this link: twice the bytes that pass in the time a message costs by itself.

    That is 2·(L + MESSAGE_S)/G, as the nearest power of two, so that links that are measured a little differently give
    the same buckets. Less costs mostly latency; more is later there, for nothing.

    >>> [message_nbytes(Link.parse(text)) >> 10 for text in ("10gbit,1ms", "1gbit,1ms", "100mbit,1ms", "10mbit,1ms")]
    [4096, 256, 64, 64]
    """
    if link.s_per_byte == 0:
        return MOST_NBYTES
    wanted = 2 * (link.latency_s + MESSAGE_S) / link.s_per_byte
    return 1 << round(math.log2(min(max(wanted, LEAST_NBYTES), MOST_NBYTES)))


def coded_names() -> set[str]:
    """What `algorithm` may be for a compressed all-reduce."""
    return {"auto", GATHER, *SPARSE, *registry.names("all_reduce")}


def plan_coded(
    channels: Sequence[Channel],
    transport: Transport,
    algorithm: str,
    hosts: tuple[int, ...] | None = None,
    divisor: int = 1,
    pool: MessagePool | None = None,
) -> Exchange:
    """The exchange of these channels by the algorithm of this name, with its plan."""
    if algorithm in SPARSE:
        from laconic.exchange.sparse_exchange import SparseExchange

        return SparseExchange(channels, transport, algorithm=algorithm, divisor=divisor)
    return CodedExchange(channels, transport, algorithm=algorithm, hosts=hosts, divisor=divisor, pool=pool)


def cheapest_coded(
    channels: Sequence[Channel], world_size: int, link: Link, *, once: bool = False, sparse: bool = True
) -> str:
    """gather or direct, or a sparse all-reduce where that is cheaper than either.

    gather takes L + (P−1)·B·G, direct 2 L + 2·B·G·(P−1)/P, where B is the payload of all channels; each decodes P
    payloads, in whole or in parts. Coarse codecs are gathered, which spares a second encoding, while that sends at most
    a sixth of what float32 would. Sparse all-reduces also encode once; they pay where the ranks' selections overlap, as
    those of many ranks do.

    Args:
        once: whether a rank has to know what it sent, and so must encode all of it once: not direct.
        sparse: whether the engine sends messages of varying length, as sparse all-reduces do.

    >>> import torch
    >>> from laconic.codecs import codec
    >>> def cheapest(spec, world_size, once=False):
    ...     return cheapest_coded([Channel(torch.empty(10**6), codec(spec))], world_size, GUESS, once=once)
    >>> cheapest("topk(0.001)", 4), cheapest("dynamic8", 4), cheapest("topk(0.25)", 16, once=True)
    ('gather', 'direct', 'dsar')
    """
    nbytes = sum(channel.codec.max_nbytes(channel.buffer.numel()) for channel in channels)
    # a peer's share of a float32 ring
    exact_nbytes = 8 / world_size * sum(channel.buffer.numel() for channel in channels)
    one_round = link.burst_s(world_size - 1, nbytes, reduced=True)
    two_rounds = 2 * link.burst_s(world_size - 1, nbytes / world_size, reduced=True) + ROUND_S
    coarse = any(channel.codec.coarse for channel in channels) and nbytes <= COARSE * exact_nbytes
    gathers = once or coarse or one_round <= two_rounds
    if sparse and world_size > 2 and is_sparse(channels):
        count, numel = counts(channels)
        name, seconds = cheapest_sparse(world_size, count, numel, link)
        work_s = world_size * count * (UNPACK_S + MERGE_S)
        if seconds + ROUND_S < SURELY * ((one_round + work_s) if gathers else two_rounds):
            return name
    return GATHER if gathers else "direct"


class Exchange(Protocol):
    """A planned exchange of channels."""

    def steps(self, step: int = 0) -> Steps: ...

    def run(self, step: int = 0) -> Timings: ...


@dataclass(frozen=True)
class Route:
    """How the messages of one exchange go: the algorithm that was asked for, and the step."""

    transport: Transport
    algorithm: str = "auto"
    hosts: tuple[int, ...] | None = None
    step: int = 0
    link: Link | None = None
