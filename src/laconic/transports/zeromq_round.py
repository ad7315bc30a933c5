"""Messages under way: the results of `ZmqTransport.post` and `send_to`, and the inbox."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
import zmq
from torch import Tensor

from laconic.errors import CollectiveTimeout, Mismatch, PeerLost, TransportError
from laconic.transports.base import Call, Incoming, Posted
from laconic.transports.frame import CHUNK_NBYTES, Arrival, EngineKind, Frame
from laconic.transports.zeromq_mesh import TICK_S
from laconic.transports.zeromq_peer import Peer

if TYPE_CHECKING:
    from laconic.transports.zeromq import ZmqTransport

Trackers = list[tuple[Peer, zmq.MessageTracker]]
# Why a rank gives up, as told to the others.
FAULTS: dict[type[TransportError], int] = {PeerLost: 1, Mismatch: 2, CollectiveTimeout: 3}
ERRORS = {number: error for error, number in FAULTS.items()}


@dataclass(eq=False)
class ZmqRound(Posted):
    """The sends and receives of one round, or with round None a single message outside collectives."""

    owner: ZmqTransport
    trackers: Trackers
    recvs: Sequence[Incoming]
    round: int | None

    def received(self, index: int) -> Tensor:
        owner, incoming = self.owner, self.recvs[index]
        assert self.round is not None
        nbytes = incoming.numel * incoming.dtype.itemsize
        if incoming.at_most:
            nbytes = self._announced_nbytes(incoming.peer, nbytes)
            incoming = replace(incoming, numel=nbytes // incoming.dtype.itemsize)
        payload = self._next_payload(incoming.peer, nbytes, 0)
        target = incoming.into
        if target is None and payload.nbytes == nbytes and nbytes and incoming.device.type == "cpu":
            # The frame itself will do; only small ones lie where ZeroMQ happened to read them.
            data = torch.frombuffer(payload, dtype=torch.uint8)
            if data.data_ptr() % incoming.dtype.itemsize == 0:
                return data.view(incoming.dtype)
        if target is None:
            target = owner.arena.take(incoming)
        room = target.view(torch.uint8)
        done = 0
        while nbytes:
            room[done : done + payload.nbytes].copy_(torch.frombuffer(payload, dtype=torch.uint8))
            done += payload.nbytes
            if done == nbytes:
                break
            payload = self._next_payload(incoming.peer, nbytes, done // CHUNK_NBYTES)
        return target if target.nbytes == nbytes else target[: incoming.numel]

    def _arrivals(self, rank: int) -> Peer:
        """Wait until something has come from a peer."""
        peer = self.owner.peer(rank, self.round)
        deadline = time.monotonic() + self.owner.timeout_s
        while not peer.queue:
            self.owner.progress(peer, self.round, deadline)
        return peer

    def _announced_nbytes(self, rank: int, most: int) -> int:
        """The length of the next message from a peer, when it is of this round and not above `most`."""
        header = self._arrivals(rank).queue[0].header
        return header.nbytes if header.step == self.round and header.nbytes <= most else most

    def _next_payload(self, rank: int, nbytes: int, chunk: int) -> memoryview:
        """Wait for the next chunk from a peer, which must be the one described."""
        peer = self._arrivals(rank)
        arrival, call, round = peer.queue.popleft(), self.owner.current, self.round
        assert call is not None
        assert round is not None
        header = arrival.header
        if header.code != call.code:
            self.owner.fail(Mismatch, _difference(peer, arrival, call), self.owner.named(rank), round)
        if (header.step, header.nbytes, header.chunk) != (round, nbytes, chunk):
            came = f"{header.nbytes} bytes in round {header.step + 1}, expected {nbytes} in round {round + 1}"
            text = f"rank {self.owner.named(rank)} sent {came}, both being in {call.signature}"
            self.owner.fail(Mismatch, text, self.owner.named(rank), round)
        return arrival.payload

    def sent(self) -> None:
        """Wait until ZeroMQ has passed on every tracked slice."""
        for peer, tracker in self.trackers:
            deadline = time.monotonic() + self.owner.timeout_s
            while not tracker.done:
                try:
                    tracker.wait(TICK_S / 4)
                except zmq.NotDone:
                    # The peer may be waiting for us to take in what it sends.
                    self.owner.progress(peer, self.round, deadline, block=False, sending=True)
                    if peer.dealer is None and not peer.left:
                        self.owner.lose(peer, self.round)
        self.trackers = []


class Inbox:
    """Files each checked message: in its peer's queue, among the parcels, or as bad news.

    Attributes:
        parcels: (peer, frame) of whole messages outside collectives.
        bad_news: why this rank must fail: the error, the reason, the culprit, and whether the others must be told.
    """

    def __init__(self, owner: ZmqTransport) -> None:
        self.owner = owner
        self.parcels: deque[tuple[int, Frame]] = deque()
        self.bad_news: tuple[type[TransportError], str, int, bool] | None = None

    def deliver(self, peer: Peer, arrival: Arrival) -> None:
        header = arrival.header
        if header.kind == EngineKind.DATA:
            peer.signature = arrival.text or peer.signature
            peer.queue.append(arrival)
            self.compare(peer, arrival)
        elif header.kind != EngineKind.FAULT:
            frame = peer.growing.add(arrival)
            if frame is not None:
                self.parcels.append((peer.rank, frame))
        elif header.code in ERRORS and self.bad_news is None:
            name = self.owner.named(peer.rank)
            error, culprit, text = ERRORS[header.code], header.subject, f"{arrival.text} (told by rank {name})"
            if culprit == self.owner.named(self.owner.rank):
                culprit = name
                text = f"rank {name} has given this rank up as lost" if error is PeerLost else text
            self.bad_news = (error, text, culprit, False)

    def compare(self, peer: Peer, arrival: Arrival) -> None:
        """Detect at once that a peer is in a different call with the same sequence number."""
        header, call = arrival.header, self.owner.current
        if call is not None and header.sequence == call.sequence and header.code != call.code:
            culprit = self.owner.named(peer.rank)
            self.bad_news = self.bad_news or (Mismatch, _difference(peer, arrival, call), culprit, True)


def _difference(peer: Peer, arrival: Arrival, call: Call) -> str:
    """Describe the peer's call and ours."""
    theirs = arrival.text or peer.signature or "another call"
    if arrival.header.sequence != call.sequence:
        theirs += f" (its call {arrival.header.sequence}, not {call.sequence})"
    them, us = (call.transport.named(rank) for rank in (peer.rank, call.transport.rank))
    return f"rank {them} is in {theirs}, rank {us} in {call.signature}"
