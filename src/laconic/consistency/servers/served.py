"""Weights on servers, as a mode uses them: opens the mesh, starts this rank's server, ends both.

Callers: `async_`, `stale`; and `easgd` for its asynchronous centre, as `Centre`.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Setup
from laconic.consistency.servers.client import Client
from laconic.consistency.servers.clocks import Clocks
from laconic.consistency.servers.coder import Coder
from laconic.consistency.servers.layout import Layout
from laconic.consistency.servers.server import Server
from laconic.consistency.servers.shards import Shard, ShardOptimizer, changed_options, plain_options
from laconic.consistency.side import open_members
from laconic.errors import BadInput
from laconic.exchange.options import CodecPlan
from laconic.transports.world import World
from laconic.transports.zeromq import ZmqTransport


@dataclass(frozen=True)
class Serving:
    """What servers do.

    Attributes:
        mode: the mode's name, for messages.
        make_optimizer: (where a shard begins, its weights) → what applies pushes to it; None: they are added.
        bound: of staleness, by clocks; None for none.
        staleness_aware: see `server.Server`.
    """

    mode: str
    make_optimizer: Callable[[int, Tensor], ShardOptimizer | None] = lambda begin, own: None
    bound: int | None = None
    staleness_aware: bool = False


class Served:
    """The flat weights of all workers, sharded over servers; every rank makes one, at the same time.

    Args:
        values: this worker's flat weights, the same on all; what is pulled is written there.
        serving: what the servers do.

    Attributes:
        client: pushes and pulls.
        server: this rank's own; None where it has none.
    """

    def __init__(self, world: World, layout: Layout, values: Tensor, serving: Serving) -> None:
        self.layout = layout
        shards: dict[int, dict[int, Shard]] = {}
        for member in range(world.world_size, len(layout.homes)):
            if layout.homes[member] == world.rank:
                shards[member] = {}
                for number in layout.held_by(member):
                    begin, end = layout.edges[number]
                    own = values[begin:end].clone()
                    clocks = Clocks(layout.trainers, serving.bound)
                    shards[member][number] = Shard(own, serving.make_optimizer(begin, own), clocks)
        members = open_members(world, layout.homes, layout.linked)
        self.server: Server | None = None
        for member, held in shards.items():
            self.server = Server(members[member], layout, held, staleness_aware=serving.staleness_aware)
        self.client = Client(members[world.rank], layout, values, serving.mode, self._server_failure)
        self._end = weakref.finalize(self, _end, self.server, self.client.mesh)

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes that worker and server of this rank have sent to other ranks."""
        return self.client.sent_nbytes + (0 if self.server is None else self.server.sent_nbytes)

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that were noticed to be gone, in order."""
        found = [*self.client.lost, *([] if self.server is None else self.server.lost)]
        return list(dict.fromkeys(self.layout.homes[member] for member in found))

    def close(self) -> None:
        """End the server and leave the mesh; safe to call twice, and done for whoever forgets it."""
        self._end()

    def _server_failure(self) -> Exception | None:
        return None if self.server is None else self.server.failure


def _end(server: Server | None, mesh: ZmqTransport) -> None:
    if server is not None:
        server.stop()
    mesh.close()  # meanwhile, so that the server's goodbye is heard
    if server is not None:
        server.join()


class Centre:
    """A vector on servers that every worker visits in its own time: the centre of asynchronous elastic averaging.

    Each visit is two messages a shard: `pull` reads w̃, and `add` moves it, so for worker i with weights wᵢ:

        centre.pull()                                  # centre.values is w̃ as it is now
        pull = wᵢ − centre.values
        wᵢ ← wᵢ − α·pull
        centre.add(α·pull, step)                       # w̃ ← w̃ + α(wᵢ − w̃), through the codec

    What a codec leaves out stays in wᵢ − w̃ and is there at the next visit, so there is no error feedback: it would
    count twice. Additions of several workers commute, and each is applied once, also when a server dies
    (`replicas=1`). `finish`, called by all, waits for all and leaves in `values` the same w̃ on every worker.

    Args:
        values: w̃ to begin with, the same on all workers; it is copied.
        codec: for what is added.
        servers, replicas: as for `async`.

    Source: Zhang, Choromanska and LeCun, Deep Learning with Elastic Averaging SGD, NeurIPS 2015, Alg. 1.
    """

    def __init__(
        self, world: World, values: Tensor, codec: CodecPlan, *, servers: int | None = None, replicas: int = 0
    ) -> None:
        self.values = values.clone()
        layout = Layout(world.world_size, servers, replicas, values.numel())
        self.served = Served(world, layout, self.values, Serving("easgd"))
        self.coder = Coder(codec, world, feedback=False)
        self._added = 0

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes that this rank has sent to others for the centre."""
        return self.served.sent_nbytes

    @property
    def wait_s(self) -> float:
        """Seconds spent waiting for the servers."""
        return self.served.client.wait_s

    @property
    def staleness(self) -> int:
        """Additions of others between this worker's last answered `add` and the `pull` before it."""
        return self.served.client.staleness

    def pull(self) -> None:
        """Bring `values` up to date."""
        self.served.client.pull()
        self.served.client.wait()

    def add(self, difference: Tensor, step: int = 0) -> None:
        """Add to the centre; returns at once, having waited for the answer to the addition before."""
        client = self.served.client
        client.wait(most=1)
        self._added += 1
        client.push(
            lambda part, x: self.coder.encode(part, x, step), difference, self._added, wants_weights=False
        )

    def finish(self) -> None:
        """Wait until all workers have called it; `values` is then the same on all."""
        self.served.client.wait()
        self._added = max(self._added, self.served.client.finish())

    def state_dict(self) -> dict[str, Any]:
        """What this rank's server holds, and what this worker's codec left out."""
        server = self.served.server
        return {
            "residuals": self.coder.residuals.state_dict(), "shards": {} if server is None else server.state_dict(),
            "versions": list(self.served.client.versions), "added": self._added,
        }  # fmt: skip

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse, on all ranks, before training goes on."""
        self.coder.residuals.load_state_dict(state["residuals"])
        self.served.client.versions[:], self._added = state["versions"], int(state["added"])
        if self.served.server is not None:
            self.served.server.load_state_dict(state["shards"])

    def close(self) -> None:
        """End server and sockets; safe to call twice."""
        self.served.close()


class ServedAgreement(OwnWeights):
    """What `async` and `stale` have in common: the inner optimiser runs on the servers, each on its shard.

    Attributes:
        served: None with one worker, which steps by itself.
        coder: for what is pushed.
        clock: pushes of this worker, as the servers count them.
        staleness: of the weights of this step, for its record.
    """

    def __init__(self, setup: Setup, serving: Serving, *, servers: int | None = None, replicas: int = 0) -> None:
        super().__init__(setup)
        self.served: Served | None = None
        self.clock = 0
        self.staleness: int | None = 0
        values, parameters, optimizer = self.weights.values, self.weights.parameters, self.optimizer
        self._initial = [plain_options(group) for group in optimizer.param_groups]
        self._gradients: list[Tensor | None] | None = None
        if not self.alone:
            layout = Layout(self.world.world_size, servers, replicas, values.numel())
            self.serves_only = self.world.rank not in layout.trainers
            self.coder = Coder(setup.codec, self.world)
            own = replace(serving, make_optimizer=lambda begin, own: ShardOptimizer(optimizer, parameters, begin, own))
            self.served = Served(self.world, layout, values, own)

    def before_step(self) -> None:
        if self.served is None:
            return
        if self.serves_only:
            raise BadInput(
                f"rank {self.world.rank} serves and does not train: it calls its job's finish() instead of its "
                "training loop, which serves until the workers have finished"
            )
        client = self.served.client
        with self.agreeing():
            waited = client.wait_s
            self.exchange(client)
            self.waited(client.wait_s - waited)

    @abstractmethod
    def exchange(self, client: Client) -> None:
        """Push and pull as this step has to, and set `staleness`."""

    def after_step(self) -> None:
        self.show_gradients()
        self.settle(self.staleness)

    @property
    def lost_ranks(self) -> list[int]:
        """Ranks that died or left while this one went on."""
        return [] if self.served is None else self.served.lost_ranks

    def sent_nbytes(self) -> int:
        return 0 if self.served is None else self.served.sent_nbytes

    def push(self, client: Client, gradients: Tensor, *, wants_weights: bool) -> None:
        """Send gradients as this worker's next update."""
        self.clock += 1
        changed = changed_options(self.optimizer.param_groups, self._initial)
        client.push(
            lambda part, x: self.coder.encode(part, x, self.step),
            gradients, self.clock, groups=changed, wants_weights=wants_weights,
        )  # fmt: skip

    def hide_gradients(self) -> None:
        """Let the inner optimiser pass all parameters by: the servers have stepped. `show_gradients` undoes it."""
        self._gradients = [parameter.grad for parameter in self.weights.parameters]
        for parameter in self.weights.parameters:
            parameter.grad = None

    def show_gradients(self) -> None:
        if self._gradients is not None:
            for parameter, gradient in zip(self.weights.parameters, self._gradients, strict=True):
                parameter.grad = gradient
            self._gradients = None

    def finish(self) -> None:
        """Wait until all workers have finished, and leave the servers' weights in every model.

        On a rank that only serves this is all there is to do.
        """
        if self.served is not None:
            with self.agreeing():
                self.served.client.wait()
                self.clock = max(self.clock, self.served.client.finish())
            self.settle_finish()

    def state_dict(self) -> dict[str, Any]:
        if self.served is None:
            return super().state_dict()
        server = self.served.server
        shards = {} if server is None else server.state_dict()
        versions = list(self.served.client.versions)
        residuals = self.coder.residuals.state_dict()
        return {**super().state_dict(), "residuals": residuals, "shards": shards, "versions": versions}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.served is not None:
            if "shards" not in state:
                raise BadInput("the state was saved by a single worker; load the optimiser's part before distribute()")
            self.coder.residuals.load_state_dict(state["residuals"])
            self.served.client.versions[:] = state["versions"]  # of the weights that the model was saved with
            if self.served.server is not None:
                self.served.server.load_state_dict(state["shards"])

    def close(self) -> None:
        if self.served is not None:
            self.served.close()
        super().close()
