"""Two levels of workers: ranks of a site, whose gradients are averaged at every step, and counterparts across sites.

Caller: `blocks.py`. The j-th ranks of all sites are counterparts. All ranks of a site hold the same weights, so that
each exchanges a share of them with its counterparts and tells the result to its site: whatever crosses between sites
crosses once a site. Without sites every rank is one by itself, and its counterparts are the whole world.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from laconic.codecs.plans import CodecPlan
from laconic.consistency.averaging import average_buffers, average_gradients, exchange_of, lay_out, trained_parameters
from laconic.consistency.base import Setup
from laconic.consistency.fragments import fragments_of
from laconic.consistency.sites import counterparts_of, site_numbers
from laconic.exchange.collectives import all_reduce, broadcast
from laconic.exchange.options import Options
from laconic.transports.base import Transport, members_of
from laconic.transports.world import World


class SiteLevels:
    """The ranks of this site, and its counterparts across sites.

    Args:
        sites: the site of each rank, or how many sites of neighbouring ranks; None: every rank is one.

    Attributes:
        numbers: the site of each rank, from 0.
        count: how many sites there are.
        size: how many ranks each of them has.
        ranks: those of this rank's site.
        place: this rank's among them.
        counterparts: the ranks with this place in their sites, this one with them.
        across: the world of the counterparts.

    Raises:
        BadInput: not a site for each rank, or sites of unequal size.
    """

    def __init__(self, world: World, sites: int | Sequence[int] | None) -> None:
        size = world.world_size
        self.numbers = tuple(range(size)) if sites is None else site_numbers(size, sites)
        places = counterparts_of(self.numbers)
        self.count, self.size = len(set(self.numbers)), len(set(places))
        self.ranks = members_of(self.numbers, world.rank)
        self.place = self.ranks.index(world.rank)
        self.counterparts = members_of(places, world.rank)
        self._inside = world.split(self.numbers) if self.size > 1 else None
        self.across = world if self._inside is None else world.split(places)

    @property
    def inside(self) -> World:
        """The world of the site's ranks, of which there are several."""
        assert self._inside is not None
        return self._inside

    @property
    def transports(self) -> list[Transport]:
        """The transports made for the two levels."""
        return [] if self._inside is None else [self._inside.transport, self.across.transport]

    def mean(self, values: Tensor) -> Tensor:
        """The exact mean over all sites of a vector that a site's ranks have in common, in place: 1/`size` by each."""
        parts = torch.tensor_split(values, self.size)
        all_reduce(parts[self.place], "mean", algorithm="ring", group=self.across)
        self.gather(parts)
        return values

    def gather(self, parts: Sequence[Tensor]) -> None:
        """Gather these parts, of which each rank of the site has its own, on all of them."""
        for place, part in enumerate(parts if self.size > 1 else ()):
            broadcast(part, root=place, group=self.inside)

    def average_buffers(self, model: nn.Module) -> None:
        """As `averaging.average_buffers` over all ranks, first inside each site."""
        if self.size > 1:
            average_buffers(model, self.inside)
        average_buffers(model, self.across)

    def close(self) -> None:
        """Leave the worlds that were made; safe to call twice."""
        if self._inside is not None:
            self.across.close()
            self._inside.close()


class SiteShares:
    """A vector laid out as `parameters` in one share a rank of the site: runs of whole parameters of about equal size.

    Where there are fewer parameters than ranks, the last ranks have none.

    Attributes:
        parameters: those of this rank's own share.
    """

    def __init__(self, levels: SiteLevels, parameters: Sequence[nn.Parameter]) -> None:
        self._levels = levels
        runs = fragments_of(parameters, max(1, min(levels.size, len(parameters))), None)
        self._slices = [run.part for run in runs]
        has_one = levels.place < len(runs)
        self.parameters = runs[levels.place].parameters if has_one else []
        self._own = runs[levels.place].part if has_one else slice(0, 0)

    def own(self, values: Tensor) -> Tensor:
        """This rank's share of a vector, a view."""
        return values[self._own]

    def gather(self, values: Tensor) -> None:
        """Gather this vector's shares, of which each rank of the site has its own, on all of them."""
        self._levels.gather([values[part] for part in self._slices])

    @property
    def numel(self) -> int:
        """How many values are this rank's own."""
        return sum(p.numel() for p in self.parameters)


class SiteGradients:
    """The mean of the gradients of a site's ranks, through a codec of the site's own, with the bits of `sync`.

    Attributes:
        state: the exchange's.
        native_nbytes: what the engine's own all-reduce sent so far, which the transport does not see.
    """

    def __init__(self, setup: Setup, levels: SiteLevels, codec: CodecPlan) -> None:
        options = Options(exempt=setup.options.exempt, world=levels.inside)
        self.state = exchange_of(replace(setup, world=levels.inside, codec=codec, options=options))
        self.state.observe(setup.model)
        self._gradients = lay_out(self.state, trained_parameters(setup.model, setup.optimizer))
        self.native_nbytes = 0

    def mean(self) -> float:
        """Average the parameters' gradients over the site; returns the seconds waited for others."""
        records = average_gradients(self.state, self._gradients)
        self.native_nbytes += sum(record.sent_nbytes for record in records if record.algorithm == "native")
        return sum(record.wait_s for record in records)

    def close(self) -> None:
        """Remove the hooks from the parameters, and end the exchange."""
        self._gradients.close()
        self.state.close()
