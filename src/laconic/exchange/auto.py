"""Which algorithm is cheapest here: from the link's profile, the engine's own all-reduce among the candidates.

Callers: `collectives.py` and the compressed exchanges, for algorithm="auto". Every rank holds the same profile, so
every rank picks the same.
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.exchange.channel import Channel
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.transports.probe import probe
from laconic.transports.profile import Profile
from laconic.transports.world import World

NATIVE = "native"
# An ordinary network under gloo, for choosing between one round and two before anything was measured.
GUESS = Link(latency_s=1e-3, s_per_byte=8e-9)
COARSE = 1 / 6
ROUND_S = 1e-3  # a second round waits for the slowest rank once more, which no link's parameters tell


def candidates(world: World) -> list[str]:
    """The all-reduce algorithms this world can run, `native` last when its engine has one."""
    names = registry.names("all_reduce")
    return [*names, NATIVE] if world.transport.has_native else names


def profile_of(world: World) -> Profile:
    """The world's profile; measured now, by all ranks together, when there is none yet."""
    if world.profile is None:
        world.profile = probe(world.transport, quick=True)
    return world.profile


def pick(world: World, nbytes: int) -> str:
    """The algorithm with the least predicted time for an all-reduce of `nbytes`."""
    if world.world_size == 1:
        return "tree"
    return profile_of(world).cheapest(world.world_size, nbytes, candidates(world))


def cheapest_form(channels: Sequence[Channel], world_size: int, link: Link) -> str:
    """gather or direct: one round of whole payloads, or two rounds of P-th parts.

    gather takes L + (P−1)·B·G, direct 2 L + 2·B·G·(P−1)/P, where B is the payload of all channels; each decodes P
    payloads, in whole or in parts. Coarse codecs are gathered, which spares a second encoding, while that sends at most
    a sixth of what float32 would.

    >>> import torch
    >>> from laconic.codecs import codec
    >>> channels = [Channel(torch.empty(10**6), codec("topk(0.001)"))]
    >>> cheapest_form(channels, 4, GUESS), cheapest_form([Channel(torch.empty(10**6), codec("dynamic8"))], 4, GUESS)
    ('gather', 'direct')
    """
    nbytes = sum(channel.codec.max_nbytes(channel.buffer.numel()) for channel in channels)
    # a peer's share of a float32 ring
    exact_nbytes = 8 / world_size * sum(channel.buffer.numel() for channel in channels)
    if any(channel.codec.coarse for channel in channels) and nbytes <= COARSE * exact_nbytes:
        return "gather"
    one_round = link.burst_s(world_size - 1, nbytes, reduced=True)
    two_rounds = 2 * link.burst_s(world_size - 1, nbytes / world_size, reduced=True)
    return "gather" if one_round <= two_rounds + ROUND_S else "direct"
