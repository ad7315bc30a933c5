"""Which algorithm is cheapest here: from the link's profile, the engine's own all-reduce among the candidates.

Callers: `collectives.py` for algorithm="auto". Every rank holds the same profile, so every rank picks the same.
"""

from __future__ import annotations

from laconic.schedules import registry
from laconic.transports.probe import probe
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
        world.profile = probe(world.transport, quick=True)
    return world.profile


def pick(world: World, nbytes: int) -> str:
    """The algorithm with the least predicted time for an all-reduce of `nbytes`."""
    if world.world_size == 1:
        return "tree"
    return profile_of(world).cheapest(world.world_size, nbytes, candidates(world))
