"""Stale-synchronous training: workers are at most `bound` steps apart; every read checks the bound."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.codecs import codec as codec_of
from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.averaging import ModelMean, OwnWeights
from laconic.consistency.base import Mode, Setup, check_whole, register
from laconic.consistency.closing import Closing
from laconic.consistency.servers.client import Client
from laconic.consistency.servers.clocks import Clocks, check_read
from laconic.consistency.servers.messages import Coder, ServerKind, ServerMessage, settings, unpack
from laconic.consistency.servers.requests import Serving
from laconic.consistency.servers.served import ServedAgreement
from laconic.consistency.servers.shards import outlives
from laconic.consistency.worker_mesh import open_mesh, receive, wait
from laconic.errors import BadInput, PayloadError, PeerLost
from laconic.storage.form import check_like
from laconic.transports.zeromq import ZmqTransport


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
        central: keep clocks and weights on servers; else workers send gradients to each other.
        servers, replicas: of the centralised form, as for `async`.

    >>> str(Stale(2, central=False))
    'stale(2, central=false)'

    Source: Ho et al., More Effective Distributed ML via a Stale Synchronous Parallel Parameter Server, NeurIPS 2013.
    Differs: nobody waits for a lost worker. The centralised form takes P small steps of the optimiser
    where sync takes one of their mean: for SGD the same up to staleness, for Adam and its like P steps.
    """

    bound: int = 4
    central: bool = True
    servers: int | None = None
    replicas: int | None = None

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

    def outlives(self, rank: int, world_size: int) -> bool:
        return not self.central or outlives(rank, world_size, self.servers, self.replicas)

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
        gradients = self.weights.gradients().div_(client.trainers)
        self.push(gradients, wants_weights=True)
        client.wait()
        check_read(f"[rank {self.world.rank}/{self.world.world_size}]", self.clock, client.slowest, self.bound)
        self.staleness = client.staleness
        self.take_pulled()


class StalePeersAgreement(OwnWeights):
    """Stale at work, decentralised: every worker has a whole model, so nothing is lost with a worker.

    A checkpoint of one worker may hold gradients of another's later steps, which that one computes again after a
    restart. So it holds the clocks too, and a gradient is counted only when its clock is new.

    Attributes:
        clocks: everyone's, as far as their gradients have come.
    """

    def __init__(self, bound: int, setup: Setup) -> None:
        super().__init__(setup)
        world = setup.world
        self.bound = bound
        self.clock = 0
        self.clocks = Clocks(range(world.world_size), bound)
        self.coder = Coder(setup.codec, world)
        self.liveness = self.losses = AgreedLosses(world, "stale")
        self.end = ModelMean(self.weights.values, setup.model)
        self._mesh: ZmqTransport | None = None
        if not self.alone:
            self._mesh = open_mesh(world)
            self._closing = Closing(self._mesh, self.losses, self._send, self.end.merge)
            self.parts["residuals"] = self.coder.residuals
            self.resources.callback(self._mesh.close)
        self._arrived: dict[int, Tensor] = {}  # by worker: the sum of gradients not yet applied
        self._early: list[ServerMessage] = []  # of steps that this worker has yet to come to
        self._staleness = 0

    def before_step(self) -> None:
        mesh = self._mesh
        if mesh is None:
            return
        with self.agreeing():
            self.clock += 1
            spec, payload = self.coder.encode(0, self.weights.gradients(), self.step)
            text = json.dumps({"codec": spec}) if spec != "none" else ""
            own = ServerMessage(ServerKind.PUSH, 0, self.world.rank, clock=self.clock, text=text, payload=payload)
            self._tell_all(own)
            self._file(own)
            early, self._early = self._early, []
            for message in early:
                self._file(message)
            while self._take_in(mesh, 0.0):
                pass
            self._wait(lambda: self.clocks.may_begin(self.world.rank))
            self._check()
            self._use_arrived()

    def _check(self) -> None:
        check_read(f"[rank {self.world.rank}/{self.world.world_size}]", self.clock, self.clocks.slowest, self.bound)
        others = [clock for worker, clock in self.clocks.clocks.items() if worker != self.world.rank]
        self._staleness = sum(max(0, self.clock - clock) for clock in others)

    def _use_arrived(self) -> None:
        """Give the inner optimiser (1/P) Σ of what has arrived, in the order of ranks."""
        total = torch.zeros_like(self.weights.values)
        for worker in sorted(self._arrived):
            total += self._arrived[worker]
        self._arrived.clear()
        total /= len(self.clocks.clocks)
        self.weights.set_gradients(total)

    def after_step(self) -> None:
        self.settle(self._staleness)

    # messages

    def _tell_all(self, message: ServerMessage) -> None:
        assert self._mesh is not None
        for peer in self._mesh.peers:
            self._send(peer, message)

    def _send(self, peer: int, message: ServerMessage) -> None:
        assert self._mesh is not None
        try:
            self._mesh.send_to(peer, message.frame)
        except PeerLost:
            return  # noticed by `_look_around`

    def _take_in(self, mesh: ZmqTransport, timeout_s: float) -> bool:
        came = receive(mesh, timeout_s)
        if came is None:
            return False
        peer, message = came[0], unpack(came[1])
        if message.worker != peer:
            raise PayloadError(f"rank {peer} speaks for rank {message.worker}")
        if peer not in self.losses.lost:
            self._file(message)
        return True

    def _file(self, message: ServerMessage) -> None:
        worker = message.worker
        if message.kind == ServerKind.PUSH and message.clock > self.clock + self.bound:
            self._early.append(message)  # with bound 0 a step is made of its own gradients only
        elif message.kind == ServerKind.PUSH and message.clock <= self.clocks.clocks.get(worker, 0):
            return  # its sender went back to a checkpoint, and these weights have the same gradient from before
        elif message.kind == ServerKind.PUSH:
            numel = self.weights.values.numel()
            sum_of = self._arrived.setdefault(worker, torch.zeros(numel))
            codec_of(str(settings(message.text).get("codec", "none"))).decode_add(message.payload, sum_of)
            if worker == self.world.rank:
                self.clocks.tick(worker, message.clock)
            elif worker in self.clocks.clocks:
                self.clocks.hear(worker, message.clock)
        else:
            if message.kind == ServerKind.FINISH:
                self.clocks.pause(worker)
            self._closing.take(message)

    def _look_around(self) -> None:
        """Give up ranks that are gone, unless they have finished."""
        self._closing.drop_gone({worker for worker in self.clocks.clocks if not self.clocks.is_away(worker)})
        for worker in self.losses.lost:
            self.clocks.leave(worker)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Receive messages until `done()`; CollectiveTimeout names the slowest if none comes for too long."""
        mesh = self._mesh
        assert mesh is not None

        def take_in(timeout_s: float) -> bool:
            came = self._take_in(mesh, timeout_s)
            if not came:
                self._look_around()
            return came

        self.waited(wait(mesh, done, take_in, self._late))

    def _late(self) -> tuple[int, str]:
        assert self._mesh is not None
        slowest = min(self.clocks.clocks, key=lambda worker: self.clocks.clocks[worker])
        text = f"rank {slowest} is the slowest, at clock {self.clocks.clocks[slowest]}"
        return slowest, f"{self._mesh.where()} stale: nothing came in {self._mesh.timeout_s:g} s; {text}"

    # the end

    def finish(self) -> None:
        """Wait for all remaining workers and leave the mean of their weights and buffers.

        Gradients that come after a worker's last step are in their senders' weights only.
        """
        mesh = self._mesh
        if mesh is None:
            return
        with self.agreeing(), self.weights.current():
            self.clocks.pause(self.world.rank)
            mean, wait_s = self._closing.agree(lambda timeout_s: self._take_in(mesh, timeout_s), self._ended)
            self.waited(wait_s)
            self.end.load(mean)
        self.settle_finish()

    def _ended(self) -> Tensor:
        """Note that all earlier messages have arrived; later ones belong to further training."""
        for worker in self.losses.lost:
            self.clocks.leave(worker)
        for message in self._early:  # of one who took more steps: all go on from the fastest clock
            if message.clock > self.clocks.clocks.get(message.worker, message.clock):
                self.clocks.hear(message.worker, message.clock)
        self._arrived.clear()
        self._early.clear()
        self.clocks.resume()
        self.clock = max(self.clocks.clocks.values())
        return self.end.pack()

    # state

    def sent_nbytes(self) -> int:
        return 0 if self._mesh is None else self._mesh.counters.total_sent_nbytes

    def state_dict(self) -> dict[str, Any]:
        arrived = {str(worker): values.clone() for worker, values in self._arrived.items()}
        clocks = [self.clocks.clocks.get(worker, self.clock) for worker in range(self.world.world_size)]
        return {**super().state_dict(), "clocks": clocks, "arrived": arrived}

    def check_state(self, state: Mapping[str, Any]) -> None:
        super().check_state(state)
        check_like(state, {"clocks": [0] * self.world.world_size}, "the state of stale")
        if not self.alone:
            self.coder.residuals.check_state(state["residuals"], {"0": self.weights.values.numel()})
        arrived = state.get("arrived", {})
        check_like(arrived, {str(w): self.weights.values for w in range(self.world.world_size) if str(w) in arrived})

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        known = dict(enumerate(state["clocks"]))
        self.clock = known[self.world.rank]
        self.clocks.clocks.update({worker: known[worker] for worker in self.clocks.clocks})
        self._early.clear()  # of the training that is given up
        self._arrived = {
            int(worker): values.to("cpu", copy=True) for worker, values in state.get("arrived", {}).items()
        }
