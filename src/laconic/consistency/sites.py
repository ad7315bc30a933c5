"""Sites: groups of ranks near to each other, whose workers agree at every step; and the slow link between two sites.

Callers: `gaia`, and hierarchical `async` (`Site`). A site is a part of the job's world (`World.split`).
"""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.codecs import Codec, indices
from laconic.codecs import codec as codec_of
from laconic.consistency.servers.messages import ServerKind, ServerMessage, settings
from laconic.errors import BadInput, PayloadError
from laconic.exchange.collectives import all_reduce, broadcast
from laconic.exchange.residuals import mode_for
from laconic.transports.world import World

# Two rounds whatever the site's size, and the same bits on all its ranks.
ALGORITHM = "direct"


def site_numbers(world_size: int, sites: int | Sequence[int]) -> tuple[int, ...]:
    """The site of each rank, from 0 in the order of their first ranks.

    Args:
        sites: a site for each rank, or how many sites of neighbouring ranks; fewer where there are fewer ranks.

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


def counterparts_of(numbers: Sequence[int]) -> list[int]:
    """The place of each rank in its site; ranks with the same place are counterparts.

    >>> counterparts_of([0, 0, 1, 1])
    [0, 1, 0, 1]

    Raises:
        BadInput: sites of unequal size.
    """
    sizes = list(Counter(numbers).values())
    if len(set(sizes)) > 1:
        text = "sites have equally many ranks, so that each rank has a counterpart in every other site"
        raise BadInput(f"{text}; these have {', '.join(map(str, sizes))}")
    return [list(numbers[:rank]).count(site) for rank, site in enumerate(numbers)]


class Site:
    """This rank's site, of those that `numbers` gives for each rank."""

    def __init__(self, world: World, numbers: Sequence[int]) -> None:
        self.number = numbers[world.rank]
        self.count = max(numbers) + 1
        # The first rank of each site speaks for it.
        self.leaders = [list(numbers).index(site) for site in range(self.count)]
        self.leads = self.leaders[self.number] == world.rank
        self.ranks = [rank for rank, site in enumerate(numbers) if site == self.number]
        self._shared = len(self.ranks) > 1
        self._world = world.split(numbers) if world.world_size > 1 else None

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes sent to ranks of this site."""
        return 0 if self._world is None else self._world.transport.counters.total_sent_nbytes

    def mean(self, values: Tensor) -> Tensor:
        """The mean over the site's ranks, in place, the same bits on all."""
        return all_reduce(values, "mean", algorithm=ALGORITHM, group=self._world) if self._shared else values

    def tell(self, values: Tensor) -> Tensor:
        """Broadcast the leader's values to all ranks of the site, in place."""
        return broadcast(values, root=0, group=self._world) if self._shared else values

    def close(self) -> None:
        """Leave the site's world; safe to call twice."""
        if self._world is not None:
            self._world.close()


class Significance:
    """Accumulates updates until they are significant: |aᵢ| > threshold/√t · |wᵢ|.

    a is the sum of all updates since value i was last told, t the step from 1, w the weights as they are. What is told
    is taken from a; what a biased codec loses of it stays.

    >>> filter = Significance(2, threshold=0.1)
    >>> filter.add(torch.tensor([0.3, 0.05]))
    >>> filter.select(torch.tensor([1.0, 1.0]), step=1).tolist()
    [0]

    Source: Hsieh et al., Gaia: Geo-Distributed Machine Learning Approaching LAN Speeds, NSDI 2017, §3.3.
    """

    def __init__(self, numel: int, threshold: float) -> None:
        self.threshold = threshold
        self.accumulated = torch.zeros(numel)

    def add(self, update: Tensor) -> None:
        """Add an update that was applied here."""
        self.accumulated.add_(update)

    def select(self, weights: Tensor, step: int) -> Tensor:
        """The sorted indices of significant values at `step`, counted from 1."""
        bar = weights.abs().mul_(self.threshold / math.sqrt(step))
        return torch.nonzero(self.accumulated.abs() > bar).reshape(-1)

    def take(self, chosen: Tensor, told: Tensor) -> None:
        """Subtract what was sent."""
        self.accumulated[chosen] -= told


class SiteLink:
    """One site's end of the link to another site: the leaders' messages, and when they wait.

    Messages (`servers/messages.py`) are PUSH, the significant updates up to a clock, none of them being a message too;
    STORED, that a PUSH with values was taken in; BARRIER; and FINISH. At most one PUSH with values is under way. What
    becomes significant meanwhile waits, adds up, and when the link is free again is announced by a BARRIER with its
    indices before the values follow: the link cannot keep up, and the other site stops until it has them. A clock is
    told only when nothing significant is held back, so a site whose mirror of another's clock is t has all its
    significant updates up to step t.
    """

    def __init__(self, site: int, numel: int, threshold: float) -> None:
        self.site = site
        self.numel = numel
        self.filter = Significance(numel, threshold)  # what the other site has not been told
        self.mirror = 0  # the other site's clock: its significant updates up to that step have come
        self.incoming: Tensor | None = None  # the sum of updates that came and were not applied yet
        self.barriers = 0  # values announced and not yet come
        self.ended = False  # the other site has finished
        self.told = 0  # values sent so far
        self.under_way = False  # values were sent and have not been confirmed
        self.held_back = False  # there are significant updates that could not be sent
        self.noise: Tensor | None = None  # told beyond what was meant, by codecs whose noise is not fed back
        self._announced: Tensor | None = None

    def outgoing(self, weights: Tensor, clock: int, codec: Codec) -> list[ServerMessage]:
        """The messages to send after step `clock`."""
        chosen = self.filter.select(weights, clock)
        if chosen.numel() and self.under_way:
            self.held_back = True
            return []
        if not chosen.numel():
            self.held_back = False  # what was held back has been undone by later updates
            return [ServerMessage(ServerKind.PUSH, self.site, 0, clock=clock)]
        values = self.filter.accumulated[chosen]
        payload = codec.encode(values, step=clock)
        told = values if codec.exact else codec.decode(payload, values.numel())
        if not codec.exact and mode_for(codec) == "off":  # the noise of unbiased codecs averages out by itself
            self.noise = torch.zeros(self.numel) if self.noise is None else self.noise
            self.noise[chosen] += told - values
            told = values
        self.filter.take(chosen, told)
        self.told += chosen.numel()
        self.under_way = True
        text = {"count": chosen.numel(), **({"codec": str(codec)} if not codec.exact else {})}
        section = _packed(chosen, self.numel)
        if not self.held_back:
            return [_message(ServerKind.PUSH, self.site, clock, text, torch.cat([section, payload]))]
        self.held_back = False
        return [
            _message(ServerKind.BARRIER, self.site, clock, text, section),
            _message(ServerKind.PUSH, self.site, clock, {**text, "announced": True}, payload),
        ]

    def take_in(self, message: ServerMessage) -> bool:
        """Store a message of the other site; return True if it needs an acknowledgement."""
        if message.kind == ServerKind.STORED:
            self.under_way = False
        elif message.kind == ServerKind.FINISH:
            self.ended = True
        elif message.kind == ServerKind.BARRIER:
            self._announced = _unpacked(message, self.numel)[0]
            self.barriers += 1
        elif message.kind == ServerKind.PUSH:
            return self._take_update(message)
        else:
            raise PayloadError(f"site {self.site} sent a message of kind {message.kind.name}")
        return False

    def _take_update(self, message: ServerMessage) -> bool:
        told = settings(message.text)
        if told.get("count"):
            if told.get("announced"):
                if self._announced is None:
                    raise PayloadError(f"site {self.site} sent values that it had not announced")
                chosen, payload = self._announced, message.payload
                self._announced = None
                self.barriers -= 1
            else:
                chosen, payload = _unpacked(message, self.numel)
            values = codec_of(str(told.get("codec", "none"))).decode(payload, chosen.numel())
            if self.incoming is None:
                self.incoming = torch.zeros(self.numel)
            self.incoming[chosen] += values
        self.mirror = max(self.mirror, message.clock)
        return bool(told.get("count"))

    def restart(self, clock: int) -> None:
        """Restart at step `clock`, with both ends up to date and nothing under way."""
        self.filter.accumulated.zero_()
        self.mirror = clock
        self.incoming = self.noise = self._announced = None
        self.barriers = 0
        self.ended = self.held_back = False


def _message(kind: ServerKind, site: int, clock: int, text: dict[str, Any], payload: Tensor) -> ServerMessage:
    return ServerMessage(kind, site, 0, clock=clock, text=json.dumps(text), payload=payload)


def _packed(chosen: Tensor, numel: int) -> Tensor:
    """Indices as bytes, with zeros up to a multiple of 8."""
    used = indices.nbytes(numel, chosen.numel())
    section = np.zeros(_padded(used), np.uint8)
    indices.pack(chosen.numpy(), numel, section[:used])
    return torch.from_numpy(section)


def _unpacked(message: ServerMessage, numel: int) -> tuple[Tensor, Tensor]:
    """The indices at the beginning of a payload, and what follows them."""
    count = settings(message.text).get("count")
    if not isinstance(count, int) or not 0 < count <= numel:
        raise PayloadError(f"a message between sites has 1 to {numel} values, this one {count!r}")
    used = indices.nbytes(numel, count)
    if message.payload.numel() < _padded(used):
        raise PayloadError(f"{count} indices of {numel} take {used} bytes, {message.payload.numel()} came")
    chosen = indices.unpack(message.payload[:used].numpy(), numel, count)
    return torch.from_numpy(chosen), message.payload[_padded(used) :]


def _padded(nbytes: int) -> int:
    return -(-nbytes // 8) * 8
