"""A worker's end of the servers: push, pull, finish, and what happens when a server dies.

Callers: `served.py`. Every request is kept until it is answered. When all agree that a shard's server is lost, the
client resends the unanswered requests, in order, to the next holder of a copy. Waits end within the time-out after the
last progress, and name the missing rank.
"""

from __future__ import annotations

import contextlib
import json
import logging
import time
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.servers.messages import ServerKind, ServerMessage, unpack, weights_in
from laconic.consistency.servers.shards import ShardLayout
from laconic.consistency.worker_mesh import receive, wait
from laconic.errors import PeerLost
from laconic.transports.frame import NOTHING, Frame
from laconic.transports.zeromq import ZmqTransport

LOGGER = logging.getLogger("laconic.consistency")
GRACE_S = 1.0  # an answer that was sent before its server left or died may take so long to come
RETRY_S = 0.01  # after a refusal: the copy notices its server's death about when the worker does


class Client:
    """One worker's requests to all servers.

    Args:
        losses: the ranks that were given up.
        values: the flat weights, which pulls overwrite.
        server_failure: the error that ended this rank's server, if any.

    Attributes:
        versions: of each shard's weights, as last pulled.
        sent_nbytes: payload bytes sent to other ranks.
        wait_s: seconds spent waiting for answers.
        buffers: of the model, the mean over all workers that finished, as bytes.
    """

    def __init__(
        self,
        mesh: ZmqTransport,
        losses: AgreedLosses,
        layout: ShardLayout,
        values: Tensor,
        server_failure: Callable[[], Any],
    ) -> None:
        self.mesh, self.losses, self.layout, self.values = mesh, losses, layout, values
        self.buffers = NOTHING
        self.edges = layout.edges
        self._server_failure = server_failure
        self.versions = [0] * len(self.edges)
        self.sent_nbytes = 0
        self.wait_s = 0.0
        self._staleness = [0] * len(self.edges)
        self._slowest = [0] * len(self.edges)
        self._homes = layout.homes
        self._sequence = [0] * len(self.edges)
        self._unanswered: list[dict[int, Frame]] = [{} for _ in self.edges]
        self._route = [layout.chain(shard)[0] for shard in range(len(self.edges))]
        self._retry_at: dict[int, float] = {}
        self._orphan_since: dict[int, float] = {}
        self._seen = [0] * len(self.edges)

    @property
    def staleness(self) -> int:
        """The largest staleness that a shard's server counted for the last answered push."""
        return max(self._staleness)

    @property
    def slowest(self) -> int:
        """The slowest worker's clock that the weights hold, over all shards."""
        return min(self._slowest)

    @property
    def trainers(self) -> int:
        """How many workers train, without those that were given up."""
        return len(set(self.layout.trainers) - set(self.losses.lost))

    def push(
        self,
        encode: Callable[[int, Tensor], tuple[str, Tensor]],
        values: Tensor,
        clock: int,
        *,
        groups: Mapping[str, Any] | None = None,
        wants_weights: bool,
    ) -> None:
        """Send every shard's part of `values`, as `encode` makes it a spec and a payload; does not wait.

        `clock` counts the steps of this worker, this one included; `groups` are the optimiser's options that changed.
        """
        for shard, (begin, end) in enumerate(self.edges):
            spec, payload = encode(shard, values[begin:end])
            told: dict[str, Any] = {"codec": spec} if spec != "none" else {}
            text = json.dumps({**told, "groups": groups} if groups else told) if told or groups else ""
            self._request(shard, ServerKind.PUSH, clock, wants_weights, text, payload)

    def pull(self) -> None:
        """Ask for the weights; does not wait."""
        for shard in range(len(self.edges)):
            self._request(shard, ServerKind.PULL, 0, True)

    def finish(self, buffers: Tensor = NOTHING) -> int:
        """Wait until all workers have finished; the weights are then the same on all. Returns the clock to go on at.

        `buffers` are this worker's, as bytes; `self.buffers` are then what the servers made of all.

        Raises:
            PeerLost: all workers were lost, or this rank was given up by the others.
        """
        for shard in range(len(self.edges)):
            self._request(shard, ServerKind.FINISH, 0, True, payload=NOTHING if shard else buffers)
        self.wait()
        note = ServerMessage(ServerKind.COMMIT, 0, self.mesh.rank).frame
        for member in self.mesh.peers:
            with contextlib.suppress(PeerLost):
                self.mesh.send_to(member, note)
        self.losses.look(0.0)
        if self.trainers == 0:
            names = ", ".join(map(str, self.layout.trainers))
            text = f"all workers (rank {names}) were lost before they had finished: the model is not trained to the end"
            raise PeerLost(f"{self._where()}: {text}", rank=self.mesh.rank, peer=self.layout.trainers[0])
        return max(self._slowest)

    def wait(self, most: int = 0) -> None:
        """Receive answers until at most `most` requests per shard are open; PeerLost if a shard has no holder left."""
        self.wait_s += wait(
            self.mesh, lambda: not any(len(asked) > most for asked in self._unanswered), self._progress,
            lambda: self._late(most),
        )  # fmt: skip

    def _late(self, most: int) -> tuple[int, str]:
        shard = next(k for k, asked in enumerate(self._unanswered) if len(asked) > most)
        rank = self._homes[self._route[shard]]
        text = f"rank {rank} has not answered for shard {shard} in {self.mesh.timeout_s:g} s"
        return rank, f"{self._where()}: {text}"

    def drain(self) -> None:
        """Receive the answers that have arrived."""
        while any(self._unanswered) and self._progress(0.0):
            pass

    def _request(
        self,
        shard: int,
        kind: ServerKind,
        clock: int,
        wants_weights: bool,
        text: str = "",
        payload: Tensor = NOTHING,
    ) -> None:
        sequence = self._sequence[shard]
        self._sequence[shard] += 1
        message = ServerMessage(
            kind, shard, self.mesh.rank, sequence, self.versions[shard], clock, 0.0, wants_weights, text=text,
            payload=payload,
        )  # fmt: skip
        frame = self._unanswered[shard][sequence] = message.frame
        self._send(shard, frame)

    def _send(self, shard: int, frame: Frame) -> None:
        member = self._route[shard]
        try:
            self.mesh.send_to(member, frame)
        except PeerLost:
            return  # noticed, and sent again, by `_look_at_routes`
        if self._homes[member] != self._homes[self.mesh.rank]:
            self.sent_nbytes += frame.payload.nbytes

    def _progress(self, timeout_s: float) -> bool:
        """Receive one message; return whether it made progress. Look for losses only once all messages are read."""
        came = receive(self.mesh, timeout_s)
        if came is None:
            self._look_at_routes()
            return False
        message = unpack(came[1])
        shard = message.shard
        if message.kind == ServerKind.REFUSED and message.wants_weights:
            raise self._nobody_has(shard)
        if message.kind == ServerKind.REFUSED:
            self._retry_at.setdefault(shard, time.monotonic() + RETRY_S)
            return False
        if message.kind == ServerKind.WAITING:
            moved, self._seen[shard] = message.version != self._seen[shard], message.version
            return moved
        if message.kind != ServerKind.REPLY or self._unanswered[shard].pop(message.sequence, None) is None:
            return False
        self._orphan_since.pop(shard, None)
        self._staleness[shard] = int(message.value)
        if message.wants_weights:
            begin, end = self.edges[shard]
            self.values[begin:end] = weights_in(message, end - begin, more=True)
            if shard == 0:
                self.buffers = message.payload[4 * (end - begin) :]
            self.versions[shard], self._slowest[shard] = message.version, message.clock
        return True

    def _look_at_routes(self) -> None:
        """Switch to the next holder of a shard whose server is lost, and resend requests where due."""
        self.losses.look()
        if (failure := self._server_failure()) is not None:
            raise failure
        lost = self.losses.lost
        live, now = [member for member in self.mesh.peers if self._homes[member] not in lost], time.monotonic()
        for shard, asked in enumerate(self._unanswered):
            if not asked:
                continue
            again = self._retry_at.get(shard, now + 1) <= now
            if self._route[shard] not in live:
                holder = self._next_holder(shard, live)
                if holder is None:
                    continue
                self.losses.give_up(self._homes[self._route[shard]])
                rank = self._homes[holder]
                LOGGER.warning("%s: shard %d is served by rank %d from now on", self._where(), shard, rank)
                self._route[shard], again = holder, True
            if again:
                self._retry_at.pop(shard, None)
                for sequence in sorted(asked):
                    self._send(shard, asked[sequence])

    def _next_holder(self, shard: int, live: list[int]) -> int | None:
        """The next living holder; None while there is none and answers may still arrive."""
        ring, gone = self.layout.ring(shard), self._route[shard]
        left = [member for member in ring[ring.index(gone) + 1 :] if member in live and self.layout.replicas]
        now = time.monotonic()
        if left or now - self._orphan_since.setdefault(shard, now) < GRACE_S:
            return left[0] if left else None
        raise self._nobody_has(shard)

    def _nobody_has(self, shard: int) -> PeerLost:
        rank = self._homes[self._route[shard]]
        cure = "" if self.layout.replicas else "; with replicas=1, where the mode has it, the others would go on"
        text = f"rank {rank}, which serves shard {shard} of {len(self.edges)}, is lost{cure}"
        if self.layout.replicas and self.losses.lost:
            text = f"shard {shard} of {len(self.edges)} was lost with ranks {', '.join(map(str, self.losses.lost))}"
        return PeerLost(f"{self._where()}: {text}", rank=self.mesh.rank, peer=rank)

    def _where(self) -> str:
        return self.losses.where
