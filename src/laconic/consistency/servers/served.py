"""Weights on servers, as a mode uses them: opens the mesh, starts this rank's server, ends both.

Callers: `async_`, `stale`; and `easgd` for its asynchronous centre.
"""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor

from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.averaging import Buffers, OwnWeights
from laconic.consistency.base import Setup
from laconic.consistency.servers.client import Client
from laconic.consistency.servers.messages import Coder
from laconic.consistency.servers.requests import Serving
from laconic.consistency.servers.server import Server
from laconic.consistency.servers.shards import (
    ShardLayout,
    ShardOptimizer,
    WeightShard,
    changed_options,
    copies,
    plain_options,
)
from laconic.consistency.worker_mesh import open_members
from laconic.errors import BadInput
from laconic.exchange.layout import SetAside
from laconic.storage.form import check_like
from laconic.transports.frame import NOTHING
from laconic.transports.world import World
from laconic.transports.zeromq import ZmqTransport


class Served:
    """The flat weights of all workers, sharded over servers; every rank makes one, at the same time.

    `values` are this worker's flat weights, the same on all; what is pulled is written there. `server` is this rank's
    own, None where it has none.
    """

    def __init__(self, world: World, layout: ShardLayout, values: Tensor, serving: Serving, coder: Coder) -> None:
        self.layout, self.coder, self.losses = layout, coder, AgreedLosses(world, serving.mode)
        shards: dict[int, dict[int, WeightShard]] = {}
        for member in range(world.world_size, len(layout.homes)):
            if layout.homes[member] == world.rank:
                shards[member] = {}
                for number in layout.held_by(member):
                    begin, end = layout.edges[number]
                    shards[member][number] = serving.shard(layout, number, values[begin:end].clone())
        members = open_members(world, layout.homes, layout.linked)
        self.server: Server | None = None
        for member, held in shards.items():
            self.server = Server(members[member], self.losses, layout, held, serving)
        self.client = Client(members[world.rank], self.losses, layout, values, self._server_failure)
        self._end = weakref.finalize(self, _end, self.server, self.client.mesh)

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes that worker and server of this rank have sent to other ranks."""
        return self.client.sent_nbytes + (0 if self.server is None else self.server.sent_nbytes)

    def push(
        self, values: Tensor, clock: int, step: int, *, wants_weights: bool, groups: Mapping[str, Any] | None = None
    ) -> None:
        """Send `values` through the codec of this step; see `Client.push`."""

        def encode(part: int, x: Tensor) -> tuple[str, Tensor]:
            return self.coder.encode(part, x, step)

        self.client.push(encode, values, clock, groups=groups, wants_weights=wants_weights)

    def finish(self, buffers: Buffers) -> int:
        """Wait for all workers, see `Client.finish`; the model's buffers are then the same on all."""
        trains = self.losses.rank in self.layout.trainers
        clock = self.client.finish(buffers.pack() if trains else NOTHING)
        if self.client.buffers.numel():
            buffers.load(self.client.buffers)
        return clock

    def state_dict(self) -> dict[str, Any]:
        """What this rank's server holds, and what this worker's codec left out."""
        shards = {} if self.server is None else self.server.state_dict()
        residuals = self.coder.residuals.state_dict()
        return {"residuals": residuals, "shards": shards, "versions": list(self.client.versions)}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other shards."""
        edges = self.layout.edges
        check_like(state, {"residuals": {}, "shards": {}, "versions": [0] * len(edges)}, "the state of the servers")
        numels = {str(number): end - begin for number, (begin, end) in enumerate(edges)}
        self.coder.residuals.check_state(state["residuals"], numels)
        if self.server is not None:
            self.server.check_state(state["shards"])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The reverse, on all ranks, before training goes on."""
        self.coder.residuals.load_state_dict(state["residuals"])
        self.client.versions[:] = state["versions"]  # of the weights that the model was saved with
        if self.server is not None:
            self.server.load_state_dict(state["shards"])

    def close(self) -> None:
        """End the server and leave the mesh; safe to call twice, and done by a finaliser otherwise."""
        self._end()

    def _server_failure(self) -> Exception | None:
        return None if self.server is None else self.server.failure


def _end(server: Server | None, mesh: ZmqTransport) -> None:
    if server is not None:
        server.stop()
    mesh.close()  # meanwhile, so that the server's goodbye is heard
    if server is not None:
        server.join()


class ServedAgreement(OwnWeights):
    """What `async` and `stale` have in common: the inner optimiser runs on the servers, each on its shard.

    Attributes:
        served: None with one worker, which steps by itself.
        clock: pushes of this worker, as the servers count them.
        staleness: of the weights of this step, for its record.
    """

    def __init__(
        self, setup: Setup, serving: Serving, *, servers: int | None = None, replicas: int | None = None
    ) -> None:
        super().__init__(setup)
        self.served: Served | None = None
        self.clock = 0
        self.staleness: int | None = 0
        values, parameters, optimizer = self.weights.values, self.weights.parameters, self.optimizer
        self._initial = [plain_options(group) for group in optimizer.param_groups]
        self._gradients: SetAside | None = None
        if not self.alone:
            layout = ShardLayout(self.world.world_size, servers, copies(servers, replicas), values.numel())
            self.serves_only = self.world.rank not in layout.trainers
            coder = Coder(setup.codec, self.world)
            own = replace(
                serving,
                make_optimizer=lambda begin, own: ShardOptimizer(optimizer, parameters, begin, own),
                merge=Buffers(self.model).mean,
            )
            self.served = Served(self.world, layout, values, own, coder)
            self.liveness = self.served.losses
            self.resources.callback(self.served.close)

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
        """Push and pull as this step requires, and set `staleness`."""

    def after_step(self) -> None:
        self.show_gradients()
        self.settle(self.staleness)

    def sent_nbytes(self) -> int:
        return 0 if self.served is None else self.served.sent_nbytes

    def push(self, gradients: Tensor, *, wants_weights: bool) -> None:
        """Send gradients as this worker's next update."""
        assert self.served is not None
        self.clock += 1
        changed = changed_options(self.optimizer.param_groups, self._initial)
        self.served.push(gradients, self.clock, self.step, groups=changed, wants_weights=wants_weights)

    def take_pulled(self) -> None:
        """Write the servers' weights to the model; hide the gradients, so that the inner optimiser does nothing.

        `show_gradients` brings the gradients back.
        """
        self.weights.write()
        self._gradients = SetAside(self.weights.parameters)

    def show_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.restore()
            self._gradients = None

    def finish(self) -> None:
        """Wait for all workers and leave the servers' weights; all there is to do on a rank that only serves."""
        if self.served is not None:
            with self.agreeing(), self.weights.current():
                self.served.client.wait()
                self.clock = max(self.clock, self.served.finish(Buffers(self.model)))
            self.settle_finish()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), **({} if self.served is None else self.served.state_dict())}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        if self.served is not None:
            if "shards" not in state:
                raise BadInput("the state was saved by a single worker; load the optimiser's part before distribute()")
            self.served.check_state(state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if self.served is not None:
            self.served.load_state_dict(state)
