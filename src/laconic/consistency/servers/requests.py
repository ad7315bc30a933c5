"""Handle a server's messages, without threads or sockets: apply, forward to copies, and answer.

Callers: `server.py`. With replicas a request is applied by the first living server of its shard, passed on to the
copies in the same order, and answered only when they have it. Each applies it by the same arithmetic, so copies are the
same bits. When a server is lost, the next one serves: workers resend unanswered requests, it skips those it has
applied, and with the first of them it sends a copy to the next server. A copy refuses requests while it considers its
shard's server alive, and ignores that server once it serves itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.consistency.servers.clocks import Clocks
from laconic.consistency.servers.messages import ServerKind, ServerMessage
from laconic.consistency.servers.shards import ShardLayout, ShardOptimizer, WeightShard
from laconic.errors import PayloadError
from laconic.storage import tree
from laconic.transports.frame import NOTHING

WAITING_S = 1.0  # how often those who finished hear that others have yet to
REQUESTS = (ServerKind.PUSH, ServerKind.PULL, ServerKind.FINISH)


@dataclass(frozen=True)
class Serving:
    """How servers handle requests.

    Attributes:
        mode: its name, for messages.
        make_optimizer: (where a shard begins, its weights) → what applies pushes to it; None: they are added.
        bound: of staleness, by clocks.
        staleness_aware: a push made with weights τ updates old is applied with 1/(1 + τ) of the learning rate.
        merge: the buffers of all workers that finished → one model's.
    """

    mode: str
    make_optimizer: Callable[[int, Tensor], ShardOptimizer | None] = lambda begin, own: None
    bound: int | None = None
    staleness_aware: bool = False
    merge: Callable[[list[Tensor]], Tensor] = lambda rows: rows[0]

    def shard(self, layout: ShardLayout, number: int, own: Tensor) -> WeightShard:
        """A shard with the weights `own`, which it keeps."""
        return WeightShard(own, self.make_optimizer(layout.edges[number][0], own), Clocks(layout.trainers, self.bound))


@dataclass
class _Held:
    """A request that is applied but not answered yet."""

    request: ServerMessage
    staleness: int
    unstored: set[int]  # copies that have yet to confirm


class RequestHandler:
    """One server's shards and the requests it has yet to answer.

    Args:
        me: this server's number in the mesh.
        shards: those it holds, by number.
        send: (member, message) → sends it, unless that member is gone.

    Attributes:
        live: the other members that still take part.
        held: whether a request waits for its answer.
    """

    def __init__(
        self,
        me: int,
        layout: ShardLayout,
        shards: dict[int, WeightShard],
        serving: Serving,
        send: Callable[[int, ServerMessage], None],
    ) -> None:
        self.me, self.layout, self.shards, self.serving, self.send = me, layout, shards, serving, send
        self.live = {member for member in range(len(layout.homes)) if layout.linked(me, member)}
        self._copies = {number: set(layout.chain(number)) - {me} for number in shards}
        self._held: list[_Held] = []
        self._answered: set[int] = set()  # workers that have all answers to their FINISH
        self._told_at = 0.0

    @property
    def held(self) -> bool:
        return bool(self._held)

    @property
    def unanswered(self) -> bool:
        """Whether a finished worker may still ask here for its answer, if another server is lost."""
        ended = {worker for shard in self.shards.values() for worker in shard.idle}
        return bool((ended & self.live) - self._answered)

    def take(self, peer: int, message: ServerMessage) -> None:
        """Handle one message."""
        if message.kind in REQUESTS:
            self._answered.discard(message.worker)
            self._request(message)
        elif message.kind == ServerKind.COMMIT:
            self._answered.add(message.worker)
        elif message.kind == ServerKind.FORWARD:
            self._store(peer, message)
        elif message.kind == ServerKind.COPY:
            self._take_over(message)
        elif message.kind == ServerKind.STORED:
            for held in self._held:
                if held.request.key == message.key:
                    held.unstored.discard(peer)

    def leave(self, member: int) -> None:
        """Remove a member: do not wait for its copies or its clock."""
        self.live.discard(member)
        for held in self._held:
            held.unstored.discard(member)
        for number, shard in self.shards.items():
            self._copies[number].discard(member)
            shard.leave(member)
        self._held = [held for held in self._held if held.request.worker != member]

    def is_idle(self, worker: int) -> bool:
        """Whether a worker has sent no request since all finished, so that it may leave."""
        self._close()
        return all(worker in shard.idle for shard in self.shards.values())

    def serves(self, number: int) -> bool:
        """Whether this server is the first living one of a shard."""
        ring = self.layout.ring(number)
        return not any(member in self.live for member in ring[: ring.index(self.me)])

    # requests

    def _request(self, message: ServerMessage) -> None:
        number, shard = message.shard, self.shards.get(message.shard)
        serves = 0 <= number < len(self.layout.edges) and self.serves(number)
        missing = 0 if shard is None else shard.missing(message)
        if shard is None or missing > 0 or not serves:
            worker, nobody = message.worker, shard is None and serves
            self.send(worker, ServerMessage(ServerKind.REFUSED, number, worker, message.sequence, wants_weights=nobody))
            return
        if any(held.request.key == message.key for held in self._held):
            return  # the same request came before, and waits for copies
        self._top_up(number)
        if missing == 0:
            self._apply(shard, message, message.kind, max(0, shard.version - message.version))
        staleness = shard.last[message.worker][1]
        copies = set(self._copies[number])  # new ones too, where this server took over what is asked again
        for member in copies:
            self.send(member, message.forwarded(staleness))
        self._held.append(_Held(message, staleness, copies))

    def _apply(self, shard: WeightShard, message: ServerMessage, kind: ServerKind, staleness: int) -> None:
        if kind == ServerKind.PUSH:
            shard.apply(message, staleness, 1.0 / (1 + staleness) if self.serving.staleness_aware else 1.0)
        else:
            shard.note(message, kind, staleness)

    def _store(self, peer: int, message: ServerMessage) -> None:
        """Apply to a copy what its shard's server applied."""
        shard = self.shards.get(message.shard)
        if shard is None or self.serves(message.shard):
            return  # from one that this server has given up as lost
        if shard.missing(message) == 0:
            self._apply(shard, message, message.original, int(message.value))
        self.send(peer, ServerMessage(ServerKind.STORED, message.shard, message.worker, message.sequence))

    # copies

    def renew_copies(self) -> None:
        """Send new copies after loading a checkpoint, which each server wrote at a different time."""
        for number in filter(self.serves, self.shards):
            self._copies[number].clear()

    def _top_up(self, number: int) -> None:
        """Send copies to the next servers, if losses left too few."""
        ring, copies = self.layout.ring(number), self._copies[number]
        for member in ring[ring.index(self.me) + 1 :]:
            if len(copies) >= self.layout.replicas:
                return
            if member in self.live and member not in copies:
                state = torch.frombuffer(tree.dumps(self.shards[number].handed_over()), dtype=torch.uint8)
                self.send(member, ServerMessage(ServerKind.COPY, number, 0, payload=state))
                copies.add(member)

    def _take_over(self, message: ServerMessage) -> None:
        number = message.shard
        if not 0 <= number < len(self.layout.edges) or self.serves(number):
            return  # from one that this server has given up as lost
        state = tree.loads(message.payload.numpy().data)
        begin, end = self.layout.edges[number]
        shard = self.serving.shard(self.layout, number, torch.zeros(end - begin))
        try:
            shard.take_over(state)
        except (KeyError, TypeError) as error:
            raise PayloadError(f"a copy of shard {number} lacks something: {error!r}") from None
        self.shards[number] = shard
        self._copies[number] = set()
        for member in range(self.layout.world_size):
            if member not in self.live:
                shard.leave(member)

    # answers

    def answer(self) -> None:
        """Answer all requests that can be answered now."""
        self._close()
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
            if tell and held.request.kind == ServerKind.FINISH:
                request, version = held.request, self.shards[held.request.shard].version
                note = ServerMessage(ServerKind.WAITING, request.shard, request.worker, request.sequence, version)
                self.send(request.worker, note)
        self._held = waiting

    def _close(self) -> None:
        """Release finished workers once all have finished."""
        workers = [member for member in range(self.layout.world_size) if member in self.live]
        for shard in self.shards.values():
            if shard.finished and shard.finished.issuperset(workers):
                shard.close(self.serving.merge)

    def _is_due(self, held: _Held) -> bool:
        if held.unstored:
            return False
        shard, request = self.shards[held.request.shard], held.request
        if request.kind == ServerKind.FINISH:
            return request.worker not in shard.finished
        return not request.wants_weights or (shard.clocks.may_begin(request.worker) and not self._is_ahead(held))

    def _is_ahead(self, held: _Held) -> bool:
        """Whether the copies still lack the updates that let this worker go on: its next push could overtake them."""
        shard, bound = held.request.shard, self.serving.bound
        return bound is not None and any(
            other.unstored and other.request.shard == shard and other.request.clock <= held.request.clock - bound
            for other in self._held
        )

    def _reply(self, held: _Held) -> None:
        shard, request = self.shards[held.request.shard], held.request
        weights = NOTHING
        if request.wants_weights:  # a copy: the shard goes on while it is on its way
            mean = shard.mean if request.kind == ServerKind.FINISH else NOTHING
            weights = torch.cat([shard.values.view(torch.uint8), mean])
        reply = ServerMessage(
            ServerKind.REPLY, request.shard, request.worker, request.sequence, shard.version, shard.clocks.slowest,
            held.staleness, request.wants_weights, payload=weights,
        )  # fmt: skip
        self.send(request.worker, reply)
