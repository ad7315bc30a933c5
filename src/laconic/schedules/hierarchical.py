"""Two levels: sum inside each host into its leader, all-reduce among the leaders, spread inside each host.

Only one rank of a host speaks to the slow network. Any algorithm serves at each level, and hosts may differ in size.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

from laconic.errors import BadInput, UnknownName
from laconic.schedules import registry
from laconic.schedules.link import Link
from laconic.schedules.registry import algorithm
from laconic.schedules.schedule import Messages, Schedule, bounds

Hosts = int | Sequence[int]


def members(world_size: int, hosts: Hosts) -> list[list[int]]:
    """The ranks of each host, leaders first.

    Args:
        hosts: how many hosts, filled with consecutive ranks as evenly as can be; or the host of each rank.

    >>> members(5, 2), members(4, (0, 1, 0, 1))
    ([[0, 1], [2, 3, 4]], [[0, 2], [1, 3]])
    """
    if isinstance(hosts, int):
        if hosts < 1:
            raise BadInput(f"hierarchical: hosts must be at least 1, got {hosts}")
        edges = bounds(world_size, min(hosts, world_size)).tolist()
        return [list(range(a, b)) for a, b in itertools.pairwise(edges)]
    if len(hosts) != world_size:
        raise BadInput(f"hierarchical: hosts names {len(hosts)} ranks, the world has {world_size}")
    groups: dict[int, list[int]] = {}
    for rank, host in enumerate(hosts):
        groups.setdefault(host, []).append(rank)
    return list(groups.values())


class _Levels:
    """The hosts' ranks and the algorithms at each level: up to the leader, across the leaders, down again."""

    def __init__(
        self, world_size: int, inner: str = "tree", outer: str = "rabenseifner", hosts: Hosts = 2, **_: Any
    ) -> None:
        valid = set(registry.names("reduce")) & set(registry.names("broadcast"))
        if inner not in valid:
            raise UnknownName("inner algorithm of hierarchical", inner, valid)
        if outer == "hierarchical":
            raise UnknownName("outer algorithm of hierarchical", outer, set(registry.names()) - {"hierarchical"})
        self.groups = members(world_size, hosts)
        self.widest = max(map(len, self.groups))
        self.up, self.down = registry.get("reduce", inner), registry.get("broadcast", inner)
        self.across = registry.get("all_reduce", outer)


def _rounds(world_size: int, **parameters: Any) -> int:
    at = _Levels(world_size, **parameters)
    return at.up.rounds(at.widest) + at.across.rounds(len(at.groups)) + at.down.rounds(at.widest)


def _sent(world_size: int, numel: int, **parameters: Any) -> int:
    at = _Levels(world_size, **parameters)
    inside = sum(way.sent_numel(len(group), numel) for group in at.groups for way in (at.up, at.down))
    return inside + at.across.sent_numel(len(at.groups), numel)


def _seconds(world_size: int, nbytes: float, link: Link, inner_link: Link | None = None, **parameters: Any) -> float:
    at = _Levels(world_size, **parameters)
    inside = sum(way.seconds(at.widest, nbytes, inner_link or link) for way in (at.up, at.down))
    return inside + at.across.seconds(len(at.groups), nbytes, link)


@algorithm("hierarchical", "all_reduce", rounds=_rounds, sent_numel=_sent, seconds=_seconds)
def hierarchical(
    world_size: int, numel: int, inner: str = "tree", outer: str = "rabenseifner", hosts: Hosts = 2
) -> Schedule:
    """Reduce inside each host, all-reduce among one leader per host, broadcast inside: for several ranks a host.

    Time: inner reduce + outer all-reduce over the hosts + inner broadcast, each by its own formula.

    Args:
        inner: reduce/broadcast algorithm inside a host.
        outer: all-reduce algorithm among the leaders.
        hosts: how many hosts (consecutive ranks, as even as can be), or the host of each rank.

    >>> hierarchical(8, 100, outer="ring", hosts=2).sent_numel
    1400
    """
    at = _Levels(world_size, inner, outer, hosts)
    outside = at.up.rounds(at.widest)
    back = outside + at.across.rounds(len(at.groups))
    leaders = [group[0] for group in at.groups]

    parts = [at.up.build(len(group), numel).messages.placed(ranks=group) for group in at.groups]
    parts.append(at.across.build(len(leaders), numel).messages.placed(rounds=outside, ranks=leaders))
    parts += [at.down.build(len(group), numel).messages.placed(rounds=back, ranks=group) for group in at.groups]
    plain_hosts = hosts if isinstance(hosts, int) else tuple(hosts)
    parameters = {"inner": inner, "outer": outer, "hosts": plain_hosts}
    return Schedule("all_reduce", "hierarchical", world_size, numel, Messages.join(parts), parameters)
