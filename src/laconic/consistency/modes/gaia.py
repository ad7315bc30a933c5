"""Gaia: sites behind slow links, synchronous inside, and only significant updates across."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.codecs.plans import PlannedCodec
from laconic.consistency.averaging import OwnWeights, average_buffers
from laconic.consistency.base import Mode, Setup, check_whole, register
from laconic.consistency.servers.messages import ServerKind, ServerMessage, unpack
from laconic.consistency.sites import Site, SiteLink, site_numbers
from laconic.consistency.worker_mesh import open_members, receive, wait
from laconic.errors import BadInput, PeerLost
from laconic.exchange.collectives import all_reduce
from laconic.storage.form import check_like
from laconic.transports.zeromq import ZmqTransport


@register("gaia")
@dataclass(frozen=True)
class Gaia(Mode):
    """Workers of a site agree at every step; only significant updates cross to other sites.

    Of S sites, each holds the whole model. At every step its workers average their gradients and the inner optimiser
    makes the update u, of which the site applies u/S. The updates of value i add up to aᵢ until |aᵢ| > v/√t · |wᵢ|
    (v = `threshold`, t the step); then aᵢ is sent to the other sites, which add it to theirs, and begins anew at 0.

    A site that is `lag` steps ahead of what it has of another's waits (mirror clock). When significant updates come
    faster than the link carries them, they are announced by their indices, and the other site waits for the values
    (selective barrier; as every step reads all weights, it waits as a whole).

    Cost: inside a site an all-reduce of n float32; across, for each significant value about 1 + log₂(n/k)/8 bytes of
    index when k of n are sent, and the value through the codec; 64 bytes a step in any case.

    Args:
        threshold: v, the relative change that is significant at the first step.
        sites: how many sites of neighbouring ranks.
        lag: steps that a site may be ahead of what it has of the others.

    Options of `distribute`:
        sites: the site of each rank, such as [0, 0, 1, 1], instead of their number.

    >>> str(Gaia(0.02))
    'gaia(0.02)'

    Source: Hsieh et al., Gaia: Geo-Distributed Machine Learning Approaching LAN Speeds, NSDI 2017, §3.3 to 3.4.
    Differs: a site's workers hold equal replicas instead of asking a server; its first rank speaks for it. Each site's
    update counts 1/S, so that the learning rate is the one of synchronous training. `finish` leaves the
    weights with all updates of all sites; so does the first step after a checkpoint is loaded.
    """

    threshold: float = 0.01
    sites: int = 2
    lag: int = 4

    summary: ClassVar[str] = "synchronous inside a site, only significant updates between sites"
    source: ClassVar[str] = "Hsieh et al., Gaia, NSDI 2017"
    examples: ClassVar[tuple[str, ...]] = ("gaia",)
    own_options: ClassVar[tuple[str, ...]] = ("sites",)
    same_weights: ClassVar[bool] = False

    @property
    def repeatable(self) -> bool:
        return False  # what waits for the link is sent together

    def __post_init__(self) -> None:
        if isinstance(self.threshold, bool) or not 0 <= self.threshold < float("inf"):
            raise BadInput(f"gaia: the threshold is a relative change from 0, got {self.threshold!r}")
        check_whole("gaia", {"sites": self.sites}, 1)
        check_whole("gaia", {"lag": self.lag}, 0)

    def install(self, setup: Setup) -> GaiaAgreement:
        return GaiaAgreement(self, setup)


class GaiaAgreement(OwnWeights):
    """Gaia at work.

    Attributes:
        links: to each other site, on the site's first rank; empty on the others.
        share: on a site's first rank, the start over S plus all updates of this site. The sum over the sites is the
            model with all updates, whatever was under way when each of them was saved.
    """

    def __init__(self, mode: Gaia, setup: Setup) -> None:
        world = setup.world
        numbers = site_numbers(world.world_size, setup.own.get("sites", mode.sites))
        super().__init__(setup)
        self.mode = mode
        self.plan = PlannedCodec(setup.codec)
        self.site = Site(world, numbers)
        self.resources.callback(self.site.close)
        self.clock = 0
        self.links: dict[int, SiteLink] = {}
        self._mesh: ZmqTransport | None = None
        self._base = torch.empty(0)
        self._restored = False
        self.share = torch.zeros(0)
        if self.site.count > 1:
            members = open_members(world, self.site.leaders, lambda one, other: True)
            if self.site.leads:
                self._mesh = members[self.site.number]
                self.resources.callback(self._mesh.close)
                numel = self.weights.values.numel()
                others = [site for site in range(self.site.count) if site != self.site.number]
                self.links = {site: SiteLink(site, numel, mode.threshold) for site in others}
                self.share = self.weights.values / self.site.count

    @property
    def crossed_nbytes(self) -> int:
        """Payload bytes that this rank has sent to other sites during training."""
        return 0 if self._mesh is None else self._mesh.counters.total_sent_nbytes

    def before_step(self) -> None:
        if self.alone:
            return
        with self.agreeing(), self.weights.current() as values:
            self._tell_all_restored()
            flat = torch.zeros(values.numel() + 1)
            self.weights.gradients(out=flat[:-1])
            if self.links:
                self._wait(self._may_begin, "is behind by more than the lag, or announced values that do not come")
                flat[-1] = float(any(link.incoming is not None for link in self.links.values()))
            self.site.mean(flat)
            if bool(flat[-1]):
                values.add_(self.site.tell(self._incoming()))
            self.weights.set_gradients(flat[:-1])
            self._base = values.clone()

    def _may_begin(self) -> bool:
        while self._take_in(0.0):
            pass
        return all(link.mirror >= self.clock - self.mode.lag and not link.barriers for link in self.links.values())

    def _incoming(self) -> Tensor:
        """Take the sum of what has come from other sites."""
        total = torch.zeros_like(self.weights.values)
        for link in self.links.values():
            if link.incoming is not None:
                total += link.incoming
                link.incoming = None
        return total

    def after_step(self) -> None:
        if self.alone:
            self.settle(0)
            return
        with self.agreeing(), self.weights.current() as values:
            self.clock += 1
            update = (values - self._base) / self.site.count
            torch.add(self._base, update, out=values)
            if self.links:
                self.share.add_(update)
            for site, link in self.links.items():
                link.filter.add(update)
                self._tell(site)
        self.settle(max((max(0, self.clock - link.mirror) for link in self.links.values()), default=0))

    # the link

    def _tell(self, site: int) -> None:
        """Send a site the significant updates of this step, as far as the link is free."""
        codec = self.plan.at(self.step)
        for message in self.links[site].outgoing(self.weights.values, self.clock, codec):
            self._send(site, message)

    def _send(self, site: int, message: ServerMessage) -> None:
        assert self._mesh is not None
        try:
            self._mesh.send_to(site, message.frame)
        except PeerLost:
            raise self._lost(site) from None

    def _take_in(self, timeout_s: float) -> bool:
        """Take in one message from another site."""
        assert self._mesh is not None
        came = receive(self._mesh, timeout_s)
        if came is None:
            for site, link in self.links.items():
                if site not in self._mesh.peers and not link.ended:
                    raise self._lost(site)
            return False
        site, frame = came
        link = self.links[site]
        if link.take_in(unpack(frame)):
            self._send(site, ServerMessage(ServerKind.STORED, self.site.number, 0))
        if link.held_back and not link.under_way:
            self._tell(site)  # now, for the other site may be waiting for it, and this one for the other
        return True

    def _wait(self, done: Callable[[], bool], why: str) -> None:
        """Receive messages until `done()`; on a time-out, `why` says what the other site failed to do."""
        mesh = self._mesh
        assert mesh is not None

        def late() -> tuple[int, str]:
            site = min(self.links, key=lambda each: self.links[each].mirror)
            text = f"nothing came in {mesh.timeout_s:g} s: site {site} (rank {self.site.leaders[site]}) {why}"
            return self.site.leaders[site], f"{self._where()}: {text}"

        self.waited(wait(mesh, done, self._take_in, late))

    def _lost(self, site: int) -> PeerLost:
        leader = self.site.leaders[site]
        text = f"rank {leader}, which speaks for site {site}, is lost"
        return PeerLost(f"{self._where()}: {text}", rank=self.world.rank, peer=leader)

    def _where(self) -> str:
        return f"[rank {self.world.rank}/{self.world.world_size}] gaia"

    # the end

    def finish(self) -> None:
        """Leave the weights with all updates of all sites.

        Site j lacks the updates that others have not sent it, so w = w_j + Σᵢ a(i→j) for every j, and for their mean:
        each leader gives (w_j + Σₖ a(j→k)) / S.
        """
        if self.alone:
            return
        with self.agreeing(), self.weights.current() as values:
            self._tell_all_restored()
            self._flush()
            values.add_(self._incoming())
            share = torch.zeros_like(values)
            if self.site.leads:
                share += values
                for link in self.links.values():
                    share += link.filter.accumulated
                share /= self.site.count
            self._begin_anew(share)
            average_buffers(self.model, self.world)
        self.settle_finish()

    def _flush(self) -> None:
        """Leave nothing under way on any link."""
        if self.links:
            self._wait(lambda: not any(link.under_way for link in self.links.values()), "confirms nothing")
            for site in self.links:
                self._send(site, ServerMessage(ServerKind.FINISH, self.site.number, 0))
            self._wait(lambda: all(link.ended for link in self.links.values()), "does not finish")

    def _begin_anew(self, share: Tensor) -> None:
        """Leave the sum of all ranks' shares in every model, with nothing left to send; after `_flush`."""
        self.weights.values.copy_(all_reduce(share, "sum", algorithm="ring", group=self.world))
        for link in self.links.values():
            link.restart(self.clock)
        if self.links:
            torch.div(self.weights.values, self.site.count, out=self.share)

    def _tell_all_restored(self) -> None:
        """After loading a checkpoint, restart all sites from the updates of all sites.

        Two sites save the same step at different times: one file may lack updates that the other site had sent, or hold
        updates that the other site sent after its own file. The shares are right in either case.
        """
        if self._restored and self.site.count > 1:
            self._flush()
            self._begin_anew(self.share.clone() if self.links else torch.zeros_like(self.weights.values))
        self._restored = False

    # state

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + self.site.sent_nbytes + self.crossed_nbytes

    def state_dict(self) -> dict[str, Any]:
        share = self.share.clone()
        for link in self.links.values():
            if link.noise is not None:
                share += link.noise / self.site.count  # as `finish`, which takes the mean of what the sites hold
        return {**super().state_dict(), "clock": self.clock, "sites": self.site.count, "share": share}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        check_like(state, {"clock": 0, "sites": 0, "share": self.share}, "the state of gaia")
        if state["sites"] != self.site.count:
            raise BadInput(f"gaia: the state is of {state['sites']} sites, this job has {self.site.count}")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Load the state, on all ranks; the next step, or `finish`, first sends all sites everything."""
        super().load_state_dict(state)
        self.clock = int(state["clock"])
        self.share.copy_(state["share"])
        for link in self.links.values():
            link.noise = None
        self._restored = True
