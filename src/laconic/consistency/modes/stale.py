"""Stale-synchronous training: workers may be some steps apart, and never more; the bound is checked at every read."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Mode, Setup, check_whole, register
from laconic.consistency.servers.client import Client
from laconic.consistency.servers.clocks import check_read
from laconic.consistency.servers.peers import StalePeersAgreement
from laconic.consistency.servers.served import ServedAgreement, Serving
from laconic.errors import BadInput


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

    def __post_init__(self) -> None:
        check_whole("stale", {"bound": self.bound}, 0, "a whole number of steps")
        if not self.central and (self.servers is not None or self.replicas):
            raise BadInput("stale: without central there are no servers and no replicas")

    @property
    def lockstep(self) -> bool:
        return False

    def install(self, setup: Setup) -> OwnWeights:
        if not self.central:
            return StalePeersAgreement(self.bound, setup)
        return StaleAgreement(self, setup)


class StaleAgreement(ServedAgreement):
    """Stale at work, centralised."""

    def __init__(self, mode: Stale, setup: Setup) -> None:
        super().__init__(setup, Serving("stale", bound=mode.bound), servers=mode.servers, replicas=mode.replicas)
        self.bound = mode.bound

    def exchange(self, client: Client) -> None:
        gradients = self.weights.gradients().div_(len(client.layout.trainers))
        self.push(client, gradients, wants_weights=True)
        client.wait()
        check_read(f"[rank {self.world.rank}/{self.world.world_size}]", self.clock, client.slowest, self.bound)
        self.staleness = client.staleness
        self.hide_gradients()
