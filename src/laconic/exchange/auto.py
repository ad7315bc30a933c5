"""Which algorithms there are, which is quickest by the link's profile, and exchanges planned by one of them.

Callers: `collectives.py` and the compressed exchanges. Every rank holds the same profile, so every rank picks the same;
what a compressed exchange would take is reckoned in `costs.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from laconic.exchange.coded import Channel, CodedExchange, MessagePool
from laconic.exchange.coded_plan import GATHER
from laconic.exchange.costs import SPARSE
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.transports.base import Steps, Timings, Transport
from laconic.transports.profile import Profile
from laconic.transports.world import World

NATIVE = "native"


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
