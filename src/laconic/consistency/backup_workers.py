"""`sync(drop_slowest=k)`: every step applies the mean of the first P − k gradients, without the k slowest.

Caller: `modes/sync.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from laconic.consistency.agreed_losses import warn_of_loss
from laconic.consistency.averaging import Buffers, OwnWeights
from laconic.consistency.base import Setup
from laconic.consistency.elastic.messages import MemberKind, MemberMessage, pack, unpack
from laconic.consistency.elastic.vectors import Exact, Occasion, Offer, collect
from laconic.consistency.worker_mesh import open_mesh, receive, wait
from laconic.errors import PayloadError, PeerLost
from laconic.transports.frame import Frame
from laconic.transports.liveness import LossLedger, LostPeer


class BackupAgreement(OwnWeights):
    """Every step applies the mean of the first P − k gradients, the same bits on all workers.

    Rank 0 sums, so a stopped rank 0 stops all. Up to `drop_slowest` of the others may also die. For workers that join,
    leave and replace each other use `laconic.elastic`.

    With gₛ,ᵢ the gradient of rank i at step s and F at least the first P − `drop_slowest` ranks to reach rank 0:
    mean = Σ_{i∈F} gₛ,ᵢ / |F|, summed in the order of ranks. A late worker applies every mean it has missed, in
    order, and its own late gradients are not used.

    Cost: rank 0 receives and sends (P − 1)·n values, the others n each way. A stopped worker's means wait in rank 0's
    memory until its connection counts as broken.

    Raises:
        PeerLost: from step(): rank 0, or more than `drop_slowest` workers, are lost.

    Source: Chen et al., Revisiting Distributed Synchronous SGD, 2016.
    Differs: rank 0's own gradient is always used, and so are others that have come when the last needed one does.
    """

    def __init__(self, setup: Setup, drop_slowest: int) -> None:
        super().__init__(setup)
        self._needed = max(1, self.world.world_size - drop_slowest)
        self._gradients: dict[int, MemberMessage] = {}
        self._vector = Exact(self.weights.values.numel())
        self._means: dict[tuple[int, int], Tensor] = {}  # by view and step
        self._view = 0  # states loaded so far: what was sent before the last is of a training that was given up
        self._finished: set[int] = set()
        self._done = False
        self.liveness = self._losses = LossLedger(range(self.world.world_size))  # known to rank 0 only
        self._mesh = open_mesh(self.world)
        self.resources.callback(self._mesh.close)

    def before_step(self) -> None:
        with self.agreeing():
            self._vector.renew()  # the last may still be on its way
            self.weights.gradients(self._vector.values)
            begun = time.perf_counter()
            mean = self._contribute() if self.world.rank else self._collect()
            self.waited(time.perf_counter() - begun)
            self.weights.set_gradients(mean)
        self.settle(staleness=0)

    def sent_nbytes(self) -> int:
        return self._mesh.counters.total_sent_nbytes

    def _collect(self) -> Tensor:
        """Rank 0's part: the mean of the first gradients, sent to all."""
        for rank in set(self._losses.here).difference(self._mesh.peers, [0]):
            self._losses.note(LostPeer(rank, 0, "its connection broke"))
            warn_of_loss(f"[rank 0/{self.world.world_size}] sync, step {self.step}", rank)
        self._drain()  # whatever has come by now counts
        ranks = range(self.world.world_size)
        offers = collect(ranks, self._needed, self._came, lambda missing: self._wait(lambda: not missing()))
        self._gradients.clear()
        body, mean = self._vector.combine(offers, Occasion(self.step, 0, len(offers)), len(ranks) - 1)
        for peer in self._mesh.peers:
            self._tell(peer, pack(MemberKind.MEAN, *self._now, body=body))
        return mean

    @property
    def _now(self) -> tuple[int, int]:
        return self._view, self.step

    def _came(self) -> dict[int, Offer]:
        """The gradients of this step that have arrived, by rank."""
        there = {rank: m.body for rank, m in self._gradients.items() if (m.view, m.step) == self._now}
        return {0: Offer(0, 1, None)} | {rank: Offer(rank, 1, body) for rank, body in there.items()}

    def _contribute(self) -> Tensor:
        """The other ranks' part; a mean that has already arrived was made without this rank."""
        self._drain()
        if self._now in self._means:
            self._tell(0, pack(MemberKind.HELD, *self._now))  # late, and on its way
        else:
            self._tell(0, pack(MemberKind.GRADIENT, *self._now, body=self._vector.values))
        self._wait(lambda: self._now in self._means)
        return self._means.pop(self._now)

    def _drain(self) -> None:
        while self._take_in(0.0):
            pass

    def _take_in(self, timeout_s: float) -> bool:
        """Receive and store one message; return whether one came."""
        came = receive(self._mesh, timeout_s)
        try:
            message = None if came is None else unpack(*came)
        except PayloadError:
            return False
        if message is None:
            return False
        if message.kind is MemberKind.GRADIENT and self._is_whole(message):
            self._gradients[message.sender] = message
        elif message.kind is MemberKind.MEAN and self._is_whole(message):
            self._means[message.view, message.step] = message.body
        elif message.kind is MemberKind.FINISH:
            self._finished.add(message.sender)
        elif message.kind is MemberKind.DONE:
            Buffers(self.model).load(message.body)
            self._done = True
        for peer in self._finished & set(self._mesh.peers):
            self._tell(peer, pack(MemberKind.BUSY, 0, self.step))
        return True

    def _is_whole(self, message: MemberMessage) -> bool:
        like = self.weights.values
        return message.body.dtype == like.dtype and message.body.shape == like.shape

    def _tell(self, peer: int, message: Frame) -> None:
        try:
            self._mesh.send_to(peer, message)
        except PeerLost:
            if peer == 0:
                raise

    def _wait(self, done: Callable[[], bool], *, finishing: bool = False) -> None:
        rank, mesh = self.world.rank, self._mesh
        where = f"[rank {rank}/{self.world.world_size}] sync, step {self.step}"

        def take_in(timeout_s: float) -> bool:
            came = self._take_in(timeout_s)
            if not came and rank == 0 and not finishing and len(mesh.peers) + 1 < self._needed:
                raise PeerLost(f"{where}: more workers are lost than drop_slowest allows", rank=rank)
            if not came and rank != 0 and 0 not in mesh.peers:
                raise PeerLost(f"{where}: rank 0 is lost", rank=rank, peer=0)
            return came

        wait(mesh, done, take_in, lambda: (None, f"{where}: not enough gradients in {mesh.timeout_s:g} s"))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._view += 1  # all ranks load
        self._means = {key: mean for key, mean in self._means.items() if key[0] >= self._view}

    def finish(self) -> None:
        """Wait until the slowest has applied every step too, while it makes progress; broadcast rank 0's buffers."""
        if self.world.rank:
            self._tell(0, pack(MemberKind.FINISH, 0, self.step))
            self._wait(lambda: self._done)
            self._done = False
            return
        self._wait(lambda: self._finished >= set(self._mesh.peers), finishing=True)
        for peer in self._mesh.peers:
            self._tell(peer, pack(MemberKind.DONE, 0, self.step, body=Buffers(self.model).pack()))
        self._finished.clear()
