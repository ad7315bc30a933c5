"""What `ZmqTransport.post` and `send_to` return: messages under way, and how to wait for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import zmq
from torch import Tensor

from laconic.errors import Mismatch, PeerLost
from laconic.transports.base import Incoming, Posted
from laconic.transports.call import Call
from laconic.transports.zeromq_mesh import TICK_S
from laconic.transports.zeromq_peer import Arrival, Peer
from laconic.transports.zeromq_wire import CHUNK_NBYTES

if TYPE_CHECKING:
    from laconic.transports.zeromq import ZmqTransport

Trackers = list[tuple[Peer, zmq.MessageTracker]]


class ZmqRound(Posted):
    """The sends and receives of one round, or with round None a single message outside collectives."""

    def __init__(self, owner: ZmqTransport, trackers: Trackers, recvs: Sequence[Incoming], round: int | None) -> None:
        self.owner = owner
        self.trackers = trackers
        self.recvs = recvs
        self.round = round

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
        return header.nbytes if header.round == self.round and header.nbytes <= most else most

    def _next_payload(self, rank: int, nbytes: int, chunk: int) -> memoryview:
        """Wait for the next chunk from a peer, which must be the one described."""
        peer = self._arrivals(rank)
        arrival, call, round = peer.queue.popleft(), self.owner.current, self.round
        assert call is not None
        assert round is not None
        header = arrival.header
        if header.code != call.code:
            self.owner.fail(Mismatch, difference(peer, arrival, call), rank, round)
        if (header.round, header.nbytes, header.chunk) != (round, nbytes, chunk):
            came = f"{header.nbytes} bytes in round {header.round + 1}, expected {nbytes} in round {round + 1}"
            self.owner.fail(Mismatch, f"rank {rank} sent {came}, both being in {call.signature}", rank, round)
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
                    self.owner.progress(peer, self.round, deadline, block=False)
                    if peer.dealer is None:
                        self.owner.fail(PeerLost, peer.why_gone, peer.rank, self.round)
        self.trackers = []


def difference(peer: Peer, arrival: Arrival, call: Call) -> str:
    """In what a peer is, and in what we are."""
    theirs = arrival.text or peer.signature or "another call"
    if arrival.header.sequence != call.sequence:
        theirs += f" (its call {arrival.header.sequence}, not {call.sequence})"
    return f"rank {peer.rank} is in {theirs}, rank {call.transport.rank} in {call.signature}"
