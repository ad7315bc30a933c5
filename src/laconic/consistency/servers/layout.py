"""Who serves what: members of the mesh, the shards, and the servers that hold each.

Callers: `server.py`, `client.py` and the modes. Pure: every rank computes the same from the same arguments.
"""

from __future__ import annotations

from dataclasses import dataclass

from laconic.consistency.servers.shards import cut
from laconic.errors import BadInput


@dataclass(frozen=True)
class Layout:
    """Workers are members 0 … P−1 of the mesh, one a rank; servers are members P, P+1, …

    Args:
        world_size: P.
        servers: dedicated servers, the last ranks; None for one beside every worker.
        replicas: further servers that hold a copy of each shard.
        numel: of the flat weights.

    Raises:
        BadInput: more servers or replicas than there can be.

    >>> layout = Layout(4, servers=None, replicas=1, numel=10)
    >>> layout.homes, layout.chain(3)
    ([0, 1, 2, 3, 0, 1, 2, 3], [7, 4])
    """

    world_size: int
    servers: int | None
    replicas: int
    numel: int

    def __post_init__(self) -> None:
        if self.servers is not None and not 0 < self.servers < self.world_size:
            raise BadInput(
                f"servers={self.servers} of {self.world_size} ranks leaves no worker or no server; without it every "
                "rank serves a part"
            )
        if self.replicas not in (0, 1):
            raise BadInput(f"replicas is 0 or 1: one copy of each shard on another server, got {self.replicas}")
        if not 0 <= self.replicas < self.server_count:
            raise BadInput(
                f"replicas={self.replicas} needs as many servers more than one, and there are {self.server_count}"
            )

    @property
    def server_count(self) -> int:
        return self.world_size if self.servers is None else self.servers

    @property
    def homes(self) -> list[int]:
        """The rank of each member."""
        return [*range(self.world_size), *range(self.world_size - self.server_count, self.world_size)]

    @property
    def trainers(self) -> list[int]:
        """The workers that train: all but those on dedicated servers."""
        return list(range(self.world_size - (self.servers or 0)))

    @property
    def edges(self) -> list[tuple[int, int]]:
        """Where each shard begins and ends."""
        return cut(self.numel, self.server_count)

    def chain(self, shard: int) -> list[int]:
        """The members that hold a shard; the first of them that lives serves it."""
        return [self.world_size + (shard + k) % self.server_count for k in range(self.replicas + 1)]

    def held_by(self, member: int) -> list[int]:
        """The shards that a server holds, its own and copies."""
        return [shard for shard in range(len(self.edges)) if member in self.chain(shard)]

    def linked(self, one: int, other: int) -> bool:
        """Workers speak with servers, and servers with each other where there are replicas."""
        is_server = [one >= self.world_size, other >= self.world_size]
        return is_server[0] != is_server[1] or (all(is_server) and self.replicas > 0)
