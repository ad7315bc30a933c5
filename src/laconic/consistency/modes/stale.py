"""Stale-synchronous training: workers may be some steps apart, and never more; the bound is checked at every read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Mode, register
from laconic.consistency.coder import refuse_options
from laconic.consistency.servers.clocks import check_bound, check_read
from laconic.consistency.servers.served import ServedAgreement
from laconic.consistency.stale_peers import StalePeersAgreement
from laconic.errors import BadInput
from laconic.exchange.policy import CodecPlan
from laconic.transports.world import World


@register("stale")
@dataclass(frozen=True)
class Stale(Mode):
    """A worker that has taken c steps computes the next only when the slowest has taken at least c − bound.

    So weights lack no update that is older than `bound` steps; with bound 0 nobody runs ahead. A read that breaks this
    raises StalenessError, on the server and again on the worker.

    Centralised: servers (see `async`) hold the weights and everyone's clock. A worker pushes its gradient g/P of every
    step, which is applied at once, and gets the weights when the clocks allow. Decentralised: each worker sends its
    gradient to all others and steps by (1/P) Σ of what has arrived since its last step, its own included; with bound 0
    that is the mean of all, and all workers hold the same bits.

    Cost: central: n values up through the codec with error feedback and n float32 down a step, and with `replicas`
    what goes up once more for each; decentral: (P−1)·n values up through the codec.

    Args:
        bound: steps that the slowest may be behind.
        central: clocks and weights on servers; else workers tell each other.
        servers, replicas: of the centralised form, as for `async`.

    Raises:
        BadInput: a value out of range.

    >>> str(Stale(2, central=False))
    'stale(2, central=false)'

    Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013.
    Differs: a worker that is lost holds nobody up any more. The centralised form takes P small steps of the optimiser
    where sync takes one of their mean: for SGD the same up to staleness, for Adam and its like P steps.
    """

    bound: int = 4
    central: bool = True
    servers: int | None = None
    replicas: int = 0

    summary: ClassVar[str] = "workers may be at most so many steps apart; checked at every read"
    source: ClassVar[str] = "Ho et al., Stale Synchronous Parallel Parameter Server, NeurIPS 2013"
    examples: ClassVar[tuple[str, ...]] = ("stale(4)", "stale(2, central=false)")
    same_weights: ClassVar[bool] = False
    lockstep: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_bound(self.bound)
        if not self.central and (self.servers is not None or self.replicas):
            raise BadInput("stale: without central there are no servers and no replicas")

    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> OwnWeights:
        refuse_options("stale", options)
        if not self.central:
            return StalePeersAgreement(self.bound, model, optimizer, world, codec)
        return StaleAgreement(self, model, optimizer, world, codec)


class StaleAgreement(ServedAgreement):
    """Stale at work, centralised."""

    name = "stale"

    def __init__(
        self, mode: Stale, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan
    ) -> None:
        self.mode = mode
        replicas = 0 if world.world_size == 1 else mode.replicas
        super().__init__(
            model, optimizer, world, codec, servers=mode.servers, replicas=replicas, bound=mode.bound
        )
        self._staleness = 0

    def before_step(self) -> None:
        if self.served is None:
            return
        self.refuse_on_server()
        client = self.served.client
        with self.agreeing():
            waited = client.wait_s
            gradients = self.weights.gradients().div_(len(self.served.layout.trainers))
            self.push(client, gradients, wants_weights=True)
            client.wait()
            check_read(f"[rank {self.world.rank}/{self.world.world_size}]", self.clock, client.slowest, self.mode.bound)
            self._staleness = client.staleness
            self.hide_gradients()
            self.waited(client.wait_s - waited)

    def after_step(self) -> None:
        self.show_gradients()
        self.settle(self._staleness)
