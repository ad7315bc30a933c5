"""Asynchronous training on parameter servers: workers do not wait for each other."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Mode, Setup, check_whole, register
from laconic.consistency.one_sided import NO_CODEC, SharedWeights
from laconic.consistency.servers.client import Client
from laconic.consistency.servers.requests import Serving
from laconic.consistency.servers.served import ServedAgreement
from laconic.consistency.servers.shards import outlives
from laconic.consistency.sites import Site, site_numbers
from laconic.errors import BadInput
from laconic.storage.form import check_like

UNANSWERED = 4  # pushes a worker may have under way before it waits for one


@register("async")
@dataclass(frozen=True)
class Async(Mode):
    """Workers push gradients to servers and pull weights, each in its own time (Downpour).

    The flat weights w are sharded over the servers; server k holds wₖ and runs the user's optimiser on it. A worker
    sums its gradients over `push` steps to g and sends each server its part; the server takes one step,
    wₖ ← step(wₖ, gₖ) with learning rate η / (1 + τ), where τ counts the updates that wₖ has had since this worker
    pulled it (without `staleness_aware`, η). Every `pull` steps the worker takes over w; in between it goes on by its
    own inner optimiser. Options that a scheduler changes travel with the push.

    Cost: n values up every `push` steps, through the codec with error feedback, and n float32 down every `pull` steps,
    from P servers; with a replica what is pushed is sent once more. A step's record has the largest τ of any
    shard.

    Args:
        push: steps between two pushes.
        pull: steps between two pulls.
        servers: the last so many ranks serve and do not train; none: every rank serves a part beside its training.
        staleness_aware: divide the learning rate by 1 + τ. P workers in turn have τ = P − 1, and so make together a
            step of η, as synchronous training does; without it one of P·η, for which the rate must be chosen.
        hierarchical: workers of a site (see `sites`) average their gradients, and its first rank alone speaks to the
            servers: Rudra's tree of two levels.
        replicas: copies of each shard on further servers, 0 or 1; an update is answered only when they have it. By
            default 1 where servers are beside the workers, for a worker that is lost takes its server along.
        rma: under mpiexec, weights lie in MPI windows that workers read and add to; nobody serves (see `one_sided.py`).

    Options of `distribute`:
        sites: for `hierarchical`: the site of each rank, or how many sites of neighbouring ranks (2).

    >>> str(Async(push=2, replicas=1))
    'async(2, replicas=1)'

    Source: Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012, §4.1; Zhang et al., Staleness-aware
    Async-SGD, IJCAI 2016, eq. 5; Gupta, Zhang and Wang, Model Accuracy and Runtime Tradeoff (Rudra), ICDM 2016.
    Differs: pushes are asynchronous, a pull is waited for; 1 + τ where eq. 5 has τ, which counts the push itself;
    Rudra's leaves are ranks that average at the same step.
    """

    push: int = 1
    pull: int = 1
    servers: int | None = None
    staleness_aware: bool = True
    hierarchical: bool = False
    replicas: int | None = None
    rma: bool = False

    summary: ClassVar[str] = "workers push gradients to servers and pull weights, each in its own time"
    source: ClassVar[str] = "Dean et al., Large Scale Distributed Deep Networks, NeurIPS 2012"
    examples: ClassVar[tuple[str, ...]] = (
        "async", "async(push=2, pull=2)", "async(hierarchical=true)", "async(replicas=1)",
    )  # fmt: skip
    same_weights: ClassVar[bool] = False

    @property
    def lockstep(self) -> bool:
        return self.hierarchical  # a site's workers wait for each other

    @property
    def repeatable(self) -> bool:
        return False

    def outlives(self, rank: int, world_size: int) -> bool:
        return not (self.hierarchical or self.rma) and outlives(rank, world_size, self.servers, self.replicas)

    @property
    def own_options(self) -> tuple[str, ...]:  # type: ignore[override]
        return ("sites",) if self.hierarchical else ()

    def __post_init__(self) -> None:
        check_whole("async", {"push": self.push, "pull": self.pull}, 1, "a whole number of steps")
        if self.hierarchical and self.replicas:
            raise BadInput("async: a site's workers wait for each other, so hierarchical has no use for replicas")
        if self.hierarchical and (self.push, self.pull, self.servers) != (1, 1, None):
            raise BadInput("async: hierarchical goes with push=1, pull=1 and servers beside the workers")
        if self.rma and (self.hierarchical or (self.servers, self.replicas) != (None, None)):
            raise BadInput("async: with rma=true there are no servers, and so neither replicas nor hierarchical")

    @property
    def no_codec(self) -> str:
        return NO_CODEC if self.rma else ""

    def install(self, setup: Setup) -> OwnWeights:
        if self.rma:
            return SharedWeights(setup, "async", self.push, self.pull, staleness_aware=self.staleness_aware)
        if self.hierarchical:
            return RudraAgreement(self, setup)
        return AsyncAgreement(self, setup)


class AsyncAgreement(ServedAgreement):
    """Async at work."""

    def __init__(self, mode: Async, setup: Setup) -> None:
        serving = Serving("async", staleness_aware=mode.staleness_aware)
        super().__init__(setup, serving, servers=mode.servers, replicas=mode.replicas)
        self.mode = mode
        self.accrued = torch.zeros_like(self.weights.values)  # gradients that have not been pushed yet
        self._accrues = False

    def exchange(self, client: Client) -> None:
        pull_is_due = (self.step + 1) % self.mode.pull == 0
        pushed = self._push(client, wants_weights=pull_is_due)
        if pull_is_due:
            if not pushed:
                client.pull()
            client.wait()
            self.take_pulled()
        else:
            client.drain()
            client.wait(most=UNANSWERED)
        self.staleness = client.staleness if pushed else None

    def _push(self, client: Client, *, wants_weights: bool) -> bool:
        """Push the accumulated gradients, if a push is due."""
        gradients = self.weights.gradients()
        if self._accrues:
            gradients += self.accrued
        self._accrues = (self.step + 1) % self.mode.push != 0
        if self._accrues:
            self.accrued.copy_(gradients)
            return False
        self.push(gradients, wants_weights=wants_weights)
        return True

    def finish(self) -> None:
        if self.served is not None and self._accrues:
            self._accrues = False
            self.push(self.accrued, wants_weights=False)
        super().finish()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        return {**state, "accrued": self.accrued.clone()} if self._accrues else state

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        check_like(state.get("accrued", self.accrued), self.accrued, "what async has accrued")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._accrues = "accrued" in state
        if self._accrues:
            self.accrued.copy_(state["accrued"])


class RudraAgreement(ServedAgreement):
    """Async by sites: the leaf, a site's first rank, pushes the mean of its gradients and passes the weights on."""

    def __init__(self, mode: Async, setup: Setup) -> None:
        numbers = site_numbers(setup.world.world_size, setup.own.get("sites", 2))
        super().__init__(setup, Serving("async", staleness_aware=mode.staleness_aware), replicas=0)
        self.site = Site(setup.world, numbers)
        self.resources.callback(self.site.close)

    def exchange(self, client: Client) -> None:
        values = self.weights.values
        gradients = self.site.mean(self.weights.gradients())
        news = torch.empty(values.numel() + 1)  # the staleness, and the weights
        if self.site.leads:
            self.push(gradients, wants_weights=True)
            client.wait()
            news[0] = client.staleness
            news[1:] = values
        self.site.tell(news)
        self.staleness = int(news[0])
        values.copy_(news[1:])
        self.take_pulled()

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + (self.site.sent_nbytes if self.served is not None else 0)
