"""What `ZmqTransport.post` and `send_to` return: messages under way, and how to wait for them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import zmq
from torch import Tensor

from laconic.transports.base import Incoming, Posted
from laconic.transports.zeromq_peer import Peer
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
            nbytes = owner.announced_nbytes(incoming.peer, self.round, nbytes)
            incoming = replace(incoming, numel=nbytes // incoming.dtype.itemsize)
        payload = owner.next_payload(incoming.peer, self.round, nbytes, 0)
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
            payload = owner.next_payload(incoming.peer, self.round, nbytes, done // CHUNK_NBYTES)
        return target if target.nbytes == nbytes else target[: incoming.numel]

    def sent(self) -> None:
        self.owner.wait_sent(self.trackers, self.round)
        self.trackers = []
