"""Stale-synchronous training without servers: workers send each other gradients and clocks.

Callers: `stale(bound, central=false)`. Every worker has a whole model and optimiser, so that one which dies takes
nothing along; the others go on at once.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.codecs import codec as codec_of
from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Setup
from laconic.consistency.mail import receive, wait
from laconic.consistency.servers.clocks import Clocks, check_read
from laconic.consistency.servers.coder import Coder
from laconic.consistency.servers.wire import Kind, Message, raw, settings, unpack, weights_in
from laconic.consistency.side import open_mesh
from laconic.errors import PayloadError, PeerLost
from laconic.transports.zeromq import ZmqTransport

LOGGER = logging.getLogger("laconic.consistency")
GRACE_S = 0.5  # what was sent before its sender left or died may take so long to come


class StalePeersAgreement(OwnWeights):
    """Stale at work, decentralised.

    Attributes:
        clocks: everyone's, as far as their gradients have come.
        clock: this worker's own.
        lost_ranks: those that died or left, in the order noticed.
    """

    def __init__(self, bound: int, setup: Setup) -> None:
        super().__init__(setup)
        world = setup.world
        self.bound = bound
        self.clock = 0
        self.clocks = Clocks(range(world.world_size), bound)
        self.lost_ranks: list[int] = []
        self.coder = Coder(setup.codec, world)
        self._mesh: ZmqTransport | None = None if self.alone else open_mesh(world)
        self._arrived: dict[int, Tensor] = {}  # by worker: the sum of gradients not yet applied
        self._early: list[Message] = []  # of steps that this worker has yet to come to
        self._gone_since: dict[int, float] = {}
        self._ended: set[int] = set()
        self._weights: dict[int, Tensor] = {}
        self._result: Tensor | None = None
        self._staleness = 0

    def before_step(self) -> None:
        mesh = self._mesh
        if mesh is None:
            return
        with self.agreeing():
            self.clock += 1
            spec, payload = self.coder.encode(0, self.weights.gradients(), self.step)
            text = json.dumps({"codec": spec}) if spec != "none" else ""
            own = Message(Kind.PUSH, 0, self.world.rank, clock=self.clock, text=text, payload=payload)
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

    def _tell_all(self, message: Message) -> None:
        assert self._mesh is not None
        data = message.pack()
        for peer in self._mesh.peers:
            self._send(peer, data)

    def _send(self, peer: int, data: Tensor) -> None:
        assert self._mesh is not None
        try:
            self._mesh.send_to(peer, data, 0)
        except PeerLost:
            return  # noticed by `_look_around`

    def _take_in(self, mesh: ZmqTransport, timeout_s: float) -> bool:
        came = receive(mesh, timeout_s)
        if came is None:
            self._look_around(mesh)
            return False
        peer, data = came
        message = unpack(data)
        if message.worker != peer:
            raise PayloadError(f"rank {peer} speaks for rank {message.worker}")
        self._file(message)
        return True

    def _file(self, message: Message) -> None:
        worker = message.worker
        if message.kind == Kind.PUSH and message.clock > self.clock + self.bound:
            self._early.append(message)  # with bound 0 a step is made of its own gradients only
        elif message.kind == Kind.PUSH:
            numel = self.weights.values.numel()
            sum_of = self._arrived.setdefault(worker, torch.zeros(numel))
            if message.payload is None:
                raise PayloadError("a gradient without payload")
            codec_of(str(settings(message.text).get("codec", "none"))).decode_add(message.payload, sum_of)
            if worker == self.world.rank:
                self.clocks.tick(worker, message.clock)
            elif worker in self.clocks.clocks:
                self.clocks.hear(worker, message.clock)
        elif message.kind == Kind.FINISH:
            self._ended.add(worker)
            self.clocks.pause(worker)
        elif message.kind == Kind.PULL:
            self._weights[worker] = weights_in(message, self.weights.values.numel()).clone()
        elif message.kind == Kind.REPLY:
            self._result = weights_in(message, self.weights.values.numel()).clone()

    def _look_around(self, mesh: ZmqTransport) -> None:
        """Go on without those who are gone, once all they sent has had the time to come."""
        live, now = {self.world.rank, *mesh.peers}, time.monotonic()
        for worker in [each for each in self.clocks.clocks if each not in live]:
            if now - self._gone_since.setdefault(worker, now) > GRACE_S:
                LOGGER.warning("[rank %d] stale: goes on without rank %d, which is lost", self.world.rank, worker)
                self.clocks.leave(worker)
                self.lost_ranks.append(worker)

    def _wait(self, done: Callable[[], bool]) -> None:
        """Take in messages until `done()`; CollectiveTimeout names the slowest when none comes for too long."""
        mesh = self._mesh
        assert mesh is not None
        self.waited(wait(mesh, done, lambda timeout_s: self._take_in(mesh, timeout_s), self._late))

    def _late(self) -> tuple[int, str]:
        assert self._mesh is not None
        slowest = min(self.clocks.clocks, key=lambda worker: self.clocks.clocks[worker])
        text = f"rank {slowest} is the slowest, at clock {self.clocks.clocks[slowest]}"
        return slowest, f"{self._mesh.where()} stale: nothing came in {self._mesh.timeout_s:g} s; {text}"

    # the end

    def finish(self) -> None:
        """Wait until all have finished and leave the mean of their weights in every model.

        Gradients that come after a worker's last step are in their senders' weights only.
        """
        mesh = self._mesh
        if mesh is None:
            return
        with self.agreeing():
            rank = self.world.rank
            note = Message(Kind.FINISH, 0, rank)
            self._tell_all(note)
            self._file(note)
            self._wait(lambda: self._ended.issuperset(self.clocks.clocks))
            # All that was sent before has come; what comes from now on belongs to training that goes on.
            self._ended.clear()
            self._arrived.clear()
            self._early.clear()
            self.clocks.resume()
            self.clock = max(self.clocks.clocks.values())
            self._average(mesh, min(self.clocks.clocks))
        self.settle_finish()

    def _average(self, mesh: ZmqTransport, root: int) -> None:
        """The lowest rank averages the weights of those who live."""
        rank, values = self.world.rank, self.weights.values
        if rank != root:
            self._send(root, Message(Kind.PULL, 0, rank, payload=raw(values)).pack())
            self._wait(lambda: self._result is not None or root not in self.clocks.clocks)
            if self._result is None:
                raise PeerLost(f"{mesh.where()} stale: rank {root}, which averages, is lost", rank=rank, peer=root)
            values.copy_(self._result)
            self._result = None
            return
        self._weights[rank] = values
        self._wait(lambda: set(self._weights).issuperset(self.clocks.clocks))
        total = torch.zeros_like(values)
        for worker in sorted(self._weights):
            total += self._weights[worker]
        values.copy_(total / len(self._weights))
        self._weights.clear()
        self._tell_all(Message(Kind.REPLY, 0, rank, payload=raw(values)))

    # state

    def sent_nbytes(self) -> int:
        return 0 if self._mesh is None else self._mesh.counters.total_sent_nbytes

    def state_dict(self) -> dict[str, Any]:
        if self.alone:
            return super().state_dict()
        arrived = {str(worker): values.clone() for worker, values in self._arrived.items()}
        return {**super().state_dict(), "residuals": self.coder.residuals.state_dict(), "arrived": arrived}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        if not self.alone:
            self.coder.residuals.load_state_dict(state["residuals"])
            self._arrived = {int(worker): values.clone() for worker, values in state["arrived"].items()}

    def close(self) -> None:
        if self._mesh is not None:
            self._mesh.close()
        super().close()
