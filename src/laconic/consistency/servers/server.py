"""A parameter server: a thread that holds shards of the weights, and detects lost members.

Callers: `async_`, `stale`, `centre` through `served.py`. One thread owns its transport; the worker beside it speaks to
it by messages as all others do, and only `lock` is shared, for checkpoints. `requests.py` handles the
messages.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import torch

from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.servers.messages import ServerMessage, unpack
from laconic.consistency.servers.requests import RequestHandler, Serving
from laconic.consistency.servers.shards import ShardLayout, WeightShard
from laconic.consistency.worker_mesh import TICK_S, receive
from laconic.errors import BadInput, PeerLost
from laconic.transports.zeromq import ZmqTransport

OWES_S = 1.0  # how long a server that is to stop waits for its copies, before it leaves requests unanswered
ENDS_S = 8.0  # and for workers that have yet to get all answers to their FINISH: until they notice a silent server


class Server:
    """One server of the mesh, whose member `mesh` it closes.

    Args:
        losses: the ranks that were given up, shared with this rank's worker.
        shards: those it holds, by number.

    Attributes:
        failure: the error that ended it, if any.
        sent_nbytes: payload bytes sent to other ranks.
    """

    def __init__(
        self,
        mesh: ZmqTransport,
        losses: AgreedLosses,
        layout: ShardLayout,
        shards: dict[int, WeightShard],
        serving: Serving,
    ) -> None:
        self.mesh, self.losses, self.shards = mesh, losses, shards
        self.failure: Exception | None = None
        self.sent_nbytes = 0
        self.lock = threading.Lock()
        self._homes = layout.homes
        self._handler = RequestHandler(mesh.rank, layout, shards, serving, self._send)
        self._stopped_at = 0.0
        self._threads = torch.get_num_threads()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"laconic-server-{losses.rank}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """End the thread at its next tick, or when it has answered what it holds; `join` waits for it."""
        self._stopped_at = time.monotonic()
        self._stop.set()

    def _owes(self) -> bool:
        """Whether a copy has yet to confirm a request, or this server may have to answer in the place of a lost one."""
        waited_s = time.monotonic() - self._stopped_at
        return (self._handler.held and waited_s < OWES_S) or (self._handler.unanswered and waited_s < ENDS_S)

    def join(self, timeout_s: float = 10.0) -> None:
        """Wait for the end of the thread."""
        self._thread.join(timeout_s)

    def state_dict(self) -> dict[str, Any]:
        """The shards that this server holds, by number."""
        with self.lock:
            return {str(number): shard.state_dict() for number, shard in self.shards.items()}

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse a state that lacks one of this server's shards; extra shards, held after a loss, are ignored."""
        if not set(state).issuperset(map(str, self.shards)):
            raise BadInput(f"the state holds shards {sorted(state)}, this server {sorted(map(str, self.shards))}")
        for number, shard in self.shards.items():
            shard.check_state(state[str(number)])

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what `state_dict` gave, on every server, before training goes on."""
        self.check_state(state)
        with self.lock:
            for number, shard in self.shards.items():
                shard.load_state_dict(state[str(number)])
            self._handler.renew_copies()

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
            if came is not None and came[0] in self._handler.live:  # else from one that was given up
                self._handler.take(came[0], unpack(came[1]))
            self._handler.answer()

    def _look_around(self) -> None:
        """Remove members that are gone, once all agree that they are; finished ones may leave."""
        handler = self._handler
        if handler.held:
            self.losses.look()
        gone = handler.live - set(self.mesh.peers)
        if gone:
            self.losses.look(0.0)
        for member in sorted(handler.live):
            if self._homes[member] in self.losses.lost:
                handler.leave(member)
        for member in sorted(gone & handler.live):
            rank = self._homes[member]
            if not self._stop.is_set() and rank != self.losses.rank and not handler.is_idle(rank):
                self.losses.give_up(rank)
            handler.leave(member)

    def _send(self, member: int, message: ServerMessage) -> None:
        try:
            self.mesh.send_to(member, message.frame)
        except PeerLost:
            return  # noticed by `_look_around`
        if self._homes[member] != self.losses.rank:
            self.sent_nbytes += message.payload.nbytes
