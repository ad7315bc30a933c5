"""A parameter server: a thread that holds shards of the weights, applies what workers push and answers with weights.

Callers: `async_`, `stale`, `centre` through `served.py`. One thread owns its transport; the worker beside it speaks to
it by messages as all others do, and only `lock` is shared, for checkpoints.

With replicas a request is applied by the first living holder of its shard, passed on to the others in the same order,
and answered only when they have it. Each applies it by the same arithmetic, so copies are the same bits. When a
holder dies the next one serves: workers send it what was not answered, and requests it knows are not applied again. A
copy refuses requests as long as it sees its shard's server alive, and ignores that server once it serves itself.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from laconic.consistency.servers.shards import Layout, Shard
from laconic.consistency.servers.wire import Kind, Message, raw, unpack
from laconic.consistency.side import TICK_S, receive
from laconic.errors import BadInput, PeerLost
from laconic.transports.zeromq import ZmqTransport

OWES_S = 1.0  # how long a server that is to stop waits for its copies, before it leaves requests unanswered
WAITING_S = 1.0  # how often those who finished hear that others have yet to
REQUESTS = (Kind.PUSH, Kind.PULL, Kind.FINISH)


@dataclass
class _Held:
    """A request that is applied here and not answered yet."""

    request: Message
    staleness: int
    unstored: set[int]  # copies that have yet to confirm


class Server:
    """One server of the mesh, whose member `mesh` it closes.

    Args:
        shards: those it holds, by number.
        staleness_aware: a push made with weights τ updates old is applied with 1/(1 + τ) of the learning rate.

    Attributes:
        failure: what ended it, if anything did.
        sent_nbytes: payload bytes sent to other ranks.
        lost: members that died or left, in the order noticed.
    """

    def __init__(self, mesh: ZmqTransport, layout: Layout, shards: dict[int, Shard], *, staleness_aware: bool) -> None:
        self.mesh, self.layout, self.shards = mesh, layout, shards
        self.staleness_aware = staleness_aware
        self.failure: Exception | None = None
        self.sent_nbytes = 0
        self.lost: list[int] = []
        self.lock = threading.Lock()
        self._me = mesh.rank
        self._homes = layout.homes
        self._live = set(mesh.peers)
        self._held: list[_Held] = []
        self._told_at = self._stopped_at = 0.0
        self._threads = torch.get_num_threads()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"laconic-server-{self._homes[self._me]}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread at its next tick, or when it has answered what it holds; `join` waits for it."""
        self._stopped_at = time.monotonic()
        self._stop.set()

    def _owes(self) -> bool:
        """Whether a request is held that a copy has yet to confirm: its worker would take this server for lost."""
        return bool(self._held) and time.monotonic() - self._stopped_at < OWES_S

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def state_dict(self) -> dict[str, Any]:
        """The shards that this server holds, by number."""
        with self.lock:
            return {str(number): shard.state_dict() for number, shard in self.shards.items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state of other shards than this server's."""
        if sorted(state) != sorted(map(str, self.shards)):
            raise BadInput(f"the state holds shards {sorted(state)}, this server {sorted(map(str, self.shards))}")
        for number, saved in state.items():
            self.shards[int(number)].check_state(saved)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, on every server, before training goes on."""
        self.check_state(state)
        with self.lock:
            for number, saved in state.items():
                self.shards[int(number)].load_state_dict(saved)

    def _run(self) -> None:
        torch.set_num_threads(self._threads)  # a thread begins with the number of cores
        try:
            while not self._stop.is_set() or self._owes():
                self._turn()
        except Exception as error:  # told by the worker beside it; the others see it leave
            self.failure = error
        finally:
            self.mesh.close()

    def _turn(self) -> None:
        """Take in one message, or none within a tick."""
        came = receive(self.mesh, TICK_S)
        with self.lock:
            self._look_around()
            if came is not None:
                peer, message = came[0], unpack(came[1])
                if message.kind in REQUESTS:
                    self._request(message)
                elif message.kind == Kind.FORWARD:
                    self._store(peer, message)
                elif message.kind == Kind.STORED:
                    self._stored(peer, message)
            self._answer()

    # requests

    def _request(self, message: Message) -> None:
        shard = self.shards.get(message.shard)
        missing = 0 if shard is None else shard.missing(message)
        if shard is None or missing > 0 or not self._serves(message.shard):
            self._send(message.worker, Message(Kind.REFUSED, message.shard, message.worker, message.sequence))
            return
        copies: set[int] = set()
        if missing == 0:
            staleness = max(0, shard.version - message.version)
            self._apply(shard, message, message.kind, staleness)
            copies = {member for member in self.layout.chain(message.shard) if member in self._live}
            for member in copies:
                self._send(member, message.forwarded(staleness))
        elif any(held.request.key == message.key for held in self._held):
            return  # the same request came before, and waits for copies
        self._held.append(_Held(message, shard.last[message.worker][1], copies))

    def _apply(self, shard: Shard, message: Message, kind: Kind, staleness: int) -> None:
        if kind == Kind.PUSH:
            rate = 1.0 / (1 + staleness) if self.staleness_aware else 1.0
            shard.apply(message, staleness, rate)
            return
        shard.last[message.worker] = (message.sequence, staleness)
        if kind == Kind.FINISH:
            shard.finished.add(message.worker)
            shard.clocks.pause(message.worker)

    def _store(self, peer: int, message: Message) -> None:
        """A copy applies what its shard's server applied."""
        shard = self.shards.get(message.shard)
        if shard is None or self._serves(message.shard):
            return  # from one that this server has given up as lost
        if shard.missing(message) == 0:
            self._apply(shard, message, message.original, int(message.value))
        self._send(peer, Message(Kind.STORED, message.shard, message.worker, message.sequence))

    def _stored(self, peer: int, message: Message) -> None:
        for held in self._held:
            if held.request.key == message.key:
                held.unstored.discard(peer)

    # answers

    def _answer(self) -> None:
        """Answer all that may be answered now."""
        workers = [member for member in range(self.layout.world_size) if member in self._live]
        for shard in self.shards.values():
            if shard.finished and shard.finished.issuperset(workers):
                shard.finished.clear()
                shard.clocks.resume()
        if not self._held:
            return
        now = time.monotonic()
        tell = now - self._told_at > WAITING_S
        self._told_at = now if tell else self._told_at
        waiting = []
        for held in self._held:
            if self._is_due(held):
                self._reply(held)
                continue
            waiting.append(held)
            if tell and held.request.kind == Kind.FINISH:
                request, version = held.request, self.shards[held.request.shard].version
                note = Message(Kind.WAITING, request.shard, request.worker, request.sequence, version)
                self._send(request.worker, note)
        self._held = waiting

    def _is_due(self, held: _Held) -> bool:
        if held.unstored:
            return False
        shard, request = self.shards[held.request.shard], held.request
        if request.kind == Kind.FINISH:
            return request.worker not in shard.finished
        return not request.wants_weights or shard.clocks.may_begin(request.worker)

    def _reply(self, held: _Held) -> None:
        shard, request = self.shards[held.request.shard], held.request
        weights = raw(shard.values) if request.wants_weights else None
        reply = Message(
            Kind.REPLY, request.shard, request.worker, request.sequence, shard.version, shard.clocks.slowest,
            held.staleness, request.wants_weights, payload=weights,
        )  # fmt: skip
        self._send(request.worker, reply)

    # peers

    def _serves(self, number: int) -> bool:
        """Whether this server is the first living holder of a shard."""
        for member in self.layout.chain(number):
            if member == self._me:
                return True
            if member in self._live:
                return False
        return False

    def _look_around(self) -> None:
        """Notice who is gone: copies are no longer waited for, nor dead workers' clocks."""
        live = set(self.mesh.peers)
        gone, self._live = self._live - live, live
        for member in sorted(gone):
            self.lost.append(member)
            for held in self._held:
                held.unstored.discard(member)
            for shard in self.shards.values():
                shard.clocks.leave(member)
                shard.finished.discard(member)
            self._held = [held for held in self._held if held.request.worker != member]

    def _send(self, member: int, message: Message) -> None:
        data = message.pack()
        try:
            self.mesh.send_to(member, data, int(message.kind))
        except PeerLost:
            return  # noticed by `_look_around`
        if self._homes[member] != self._homes[self._me]:
            self.sent_nbytes += data.numel()
