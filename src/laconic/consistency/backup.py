"""Synchronous training with backup workers: a step takes the first gradients that come, and waits for no straggler.

Callers: `sync(drop_slowest=k)`. Rank 0 sums: whoever sums must not be the one that is waited for, so a stopped rank 0
stops all. Workers may also die: up to `drop_slowest` of them, but not rank 0. For workers that come, go and take each
other's place there is `laconic.elastic`.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from laconic.consistency.averaging import OwnWeights
from laconic.consistency.base import Setup
from laconic.consistency.churn.messages import Kind, Message, address, blank, pack, unpack, values_of
from laconic.consistency.churn.wire import weighted_mean
from laconic.consistency.side import open_mesh
from laconic.errors import CollectiveTimeout, PayloadError, PeerLost

TICK_S = 0.02


class BackupAgreement(OwnWeights):
    """Every step applies the mean of the first P − k gradients, the same bits on all workers.

    With gₛ,ᵢ the gradient of rank i at step s and F at least the first P − `drop_slowest` ranks to reach rank 0:
    mean = Σ_{i∈F} gₛ,ᵢ / |F|, summed in the order of ranks. A late worker applies every mean it has missed, in
    order, and its own late gradients are not used.

    Cost: rank 0 receives and sends (P − 1)·n values, the others n each way. A stopped worker's means wait in rank 0's
    memory until its connection counts as broken.

    Raises:
        BadInput: parameters that are not float32 on the CPU.
        PeerLost: from step(): rank 0, or more than `drop_slowest` workers, are lost.

    Source: Chen et al., Revisiting Distributed Synchronous SGD, 2016.
    Differs: rank 0's own gradient is always used, and so are others that have come when the last needed one does.
    """

    def __init__(self, setup: Setup, drop_slowest: int) -> None:
        super().__init__(setup)
        self._needed = max(1, self.world.world_size - drop_slowest)
        self._gradients: dict[int, Message] = {}
        self._finished: set[int] = set()
        self._mesh = open_mesh(self.world)

    def before_step(self) -> None:
        with self.agreeing():
            message = blank(4 * self.weights.values.numel())  # a new one: the last may still be on its way
            self.weights.gradients(values_of(message))
            begun = time.perf_counter()
            mean = self._collect(message) if self.world.rank == 0 else self._contribute(message)
            self.waited(time.perf_counter() - begun)
            self.weights.set_gradients(mean)
        self.settle(staleness=0)

    def sent_nbytes(self) -> int:
        return self._mesh.counters.total_sent_nbytes

    def _collect(self, own: Tensor) -> Tensor:
        """Rank 0's part: the mean of the first gradients, sent to all."""
        deadline = time.monotonic() + self._mesh.timeout_s
        while self._next(0.0) is not None:
            pass  # whatever has come by now counts
        while True:
            came = {r: (1, m.body.view(torch.float32)) for r, m in self._gradients.items() if m.step == self.step}
            came[0] = (1, values_of(own))
            if len(came) >= self._needed:
                break
            if self._next() is None:
                self._check(len(self._mesh.peers) + 1 >= self._needed, deadline)
        self._gradients.clear()
        message = blank(4 * self.weights.values.numel())
        weighted_mean([came[rank] for rank in sorted(came)], values_of(message))
        address(message, Kind.MEAN, 0, self.step)
        for peer in self._mesh.peers:
            self._tell(peer, message)
        return values_of(message).clone()  # a copy: the message is on its way

    def _contribute(self, own: Tensor) -> Tensor:
        """The other ranks' part; a mean that is there already was made without this rank."""
        deadline = time.monotonic() + self._mesh.timeout_s
        message = self._next(0.0)
        if message is None:
            self._tell(0, address(own, Kind.GRADIENT, 0, self.step))
        else:
            self._tell(0, pack(Kind.HELD, 0, self.step))  # late, and on its way
        while message is None or message.kind is not Kind.MEAN or message.step != self.step:
            message = self._next()
            if message is None:
                self._check(0 in self._mesh.peers, deadline)
        return message.body.view(torch.float32)

    def _next(self, wait_s: float = TICK_S) -> Message | None:
        try:
            sender, _, tensor = self._mesh.recv_any(wait_s)
            message = unpack(sender, tensor)
        except (CollectiveTimeout, PayloadError):
            return None
        except PeerLost:  # nobody is left; whether that matters is for `_check`
            return None
        if message.kind is Kind.GRADIENT and message.body.numel() == 4 * self.weights.values.numel():
            self._gradients[sender] = message
        elif message.kind is Kind.FINISH:
            self._finished.add(sender)
        return message

    def _tell(self, peer: int, message: Tensor) -> None:
        try:
            self._mesh.send_to(peer, message, 0)
        except PeerLost:
            if peer == 0:
                raise

    def _check(self, hope: bool, deadline: float) -> None:
        where = f"[rank {self.world.rank}/{self.world.world_size}] sync, step {self.step}"
        if not hope:
            who = "more workers are lost than drop_slowest allows" if self.world.rank == 0 else "rank 0 is lost"
            raise PeerLost(f"{where}: {who}", rank=self.world.rank, peer=None if self.world.rank == 0 else 0)
        if time.monotonic() > deadline:
            text = f"{where}: not enough gradients in {self._mesh.timeout_s:g} s"
            raise CollectiveTimeout(text, rank=self.world.rank)

    def finish(self) -> None:
        """Wait until the slowest has applied every step too: as long as it goes on, and rank 0 says so."""
        deadline = time.monotonic() + self._mesh.timeout_s
        if self.world.rank:
            self._tell(0, pack(Kind.FINISH, 0, self.step))
            while (message := self._next()) is None or message.kind is not Kind.DONE:
                if message is not None:
                    deadline = time.monotonic() + self._mesh.timeout_s
                self._check(0 in self._mesh.peers, deadline)
            return
        while not self._finished >= set(self._mesh.peers):
            if self._next() is None:
                self._check(True, deadline)
                continue
            deadline = time.monotonic() + self._mesh.timeout_s
            for peer in self._finished & set(self._mesh.peers):
                self._tell(peer, pack(Kind.BUSY, 0, self.step))
        for peer in self._mesh.peers:
            self._tell(peer, pack(Kind.DONE, 0, self.step))
        self._finished.clear()

    def close(self) -> None:
        self._mesh.close()
        super().close()
