"""Sites: groups of ranks near to each other, whose workers agree at every step.

Callers: `gaia` and hierarchical `async`. A site is a part of the job's world (`World.split`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from torch import Tensor

from laconic.errors import BadInput, TransportError
from laconic.exchange.collectives import all_reduce, broadcast
from laconic.transports.world import World

# Two rounds whatever the site's size, and the same bits on all its ranks.
ALGORITHM = "direct"


def site_numbers(world_size: int, sites: int | Sequence[int]) -> tuple[int, ...]:
    """The site of each rank, from 0 in the order of their first ranks.

    Args:
        sites: a site for each rank, or how many sites of neighbouring ranks; fewer where there are fewer ranks.

    Raises:
        BadInput: not one entry a rank, or no site.

    >>> site_numbers(5, 2), site_numbers(3, [7, 4, 7])
    ((0, 0, 0, 1, 1), (0, 1, 0))
    """
    if isinstance(sites, int) and not isinstance(sites, bool):
        if sites < 1:
            raise BadInput(f"there is at least one site, got {sites}")
        count = min(sites, world_size)
        return tuple(rank * count // world_size for rank in range(world_size))
    given = list(sites) if isinstance(sites, Sequence) and not isinstance(sites, str) else None
    if given is None or len(given) != world_size:
        raise BadInput(f"sites is a number of sites or the site of each of {world_size} ranks, got {sites!r}")
    order = list(dict.fromkeys(given))
    return tuple(order.index(site) for site in given)


class Site:
    """This rank's site.

    Args:
        numbers: the site of each rank.

    Attributes:
        number: which site it is.
        count: how many sites there are.
        leaders: the first rank of each site, which speaks for it.
        ranks: those of this site.
    """

    def __init__(self, world: World, numbers: Sequence[int]) -> None:
        self.number = numbers[world.rank]
        self.count = max(numbers) + 1
        self.leaders = [list(numbers).index(site) for site in range(self.count)]
        self.leads = self.leaders[self.number] == world.rank
        self.ranks = [rank for rank, site in enumerate(numbers) if site == self.number]
        self.size = len(self.ranks)
        self._whole = f"[rank {world.rank}/{world.world_size}] site {self.number}"
        self._world = world.split(numbers) if world.world_size > 1 else None

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes sent to ranks of this site."""
        return 0 if self._world is None else self._world.transport.counters.total_sent_nbytes

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the site's ranks, in place, the same bits on all."""
        if self._world is not None and self.size > 1:
            with self._named():
                all_reduce(values, "mean", algorithm=ALGORITHM, group=self._world)
        return values

    def tell(self, values: Tensor) -> Tensor:
        """The leader's values on all ranks of the site, in place."""
        if self._world is not None and self.size > 1:
            with self._named():
                broadcast(values, root=0, group=self._world)
        return values

    @contextmanager
    def _named(self) -> Iterator[None]:
        """Errors name ranks of the job, where the site's world knows its own numbers only."""
        try:
            yield
        except TransportError as error:
            rank = self.ranks[error.rank]
            peer = None if error.peer is None else self.ranks[error.peer]
            about = "" if peer is None else f" (rank {peer} of the job)"
            raise type(error)(f"{self._whole}{about}: {error}", rank=rank, peer=peer, round=error.round) from error

    def close(self) -> None:
        """Leave the site's world; safe to call twice."""
        if self._world is not None:
            self._world.close()
