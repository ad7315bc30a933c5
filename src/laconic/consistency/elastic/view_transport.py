"""The members of one view as the ranks of a transport, so that every schedule and codec serves them.

Caller: `group.py`, which makes one for each view. Ranks are the members' places. Pieces travel from member to member
over their existing line, with its keys. The group does the waiting: when the view ends, waits raise NewView.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.consistency.elastic.line import Line
from laconic.consistency.elastic.messages import MemberKind, pack
from laconic.errors import Mismatch, PeerLost
from laconic.transports.base import Call, Incoming, Outgoing, Posted, Transport
from laconic.transports.zeromq_address import Address
from laconic.transports.zeromq_round import Trackers

Until = Callable[[Callable[[], bool]], None]


class ViewTransport(Transport):
    """One member's end in one view.

    Args:
        until: waits until a condition is true, or raises NewView.

    Attributes:
        hosts: the host of each rank, by the addresses in the view.
    """

    engine = "zmq"

    def __init__(self, line: Line, until: Until) -> None:
        self.line, self.view, self.until = line, line.view, until
        super().__init__(self.view.ids.index(line.id), len(self.view.ids), line.transport.timeout_s)
        names = [Address.parse(address).host for _, address in self.view.members]
        self.hosts = tuple(names.index(name) for name in names)

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        code = zlib.crc32(bytes([round & 0xFF]), call.code)
        trackers: Trackers = []
        for send in sends:
            with contextlib.suppress(PeerLost):  # the wait for what should come from there notices it
                piece = pack(MemberKind.PIECE, self.view.number, round, code, body=send.data)
                trackers += self.line.transport.send_to(self.view.ids[send.peer], piece).trackers
        return _Round(self, call, trackers, recvs, (round, code))

    def close(self) -> None:
        """The line outlives the view."""


@dataclass(eq=False)
class _Round(Posted):
    """The pieces of one round."""

    owner: ViewTransport
    call: Call
    trackers: Trackers
    recvs: Sequence[Incoming]
    about: tuple[int, int]  # the round and its code

    def received(self, index: int) -> Tensor:
        owner, incoming, (round, expected) = self.owner, self.recvs[index], self.about
        pieces = owner.line.progress.pieces[owner.view.ids[incoming.peer]]
        owner.until(lambda: bool(pieces))
        code, data = pieces.popleft()
        most = incoming.numel * incoming.dtype.itemsize
        if code != expected or data.nbytes > most or (data.nbytes < most and not incoming.at_most):
            text = f"peer {incoming.peer} sent {data.nbytes} bytes of another call, or not the {most} expected"
            raise owner.failure(Mismatch, text, incoming.peer, round, self.call)
        if incoming.into is None:
            return data.view(torch.uint8).view(incoming.dtype)
        room = incoming.into.view(torch.uint8)[: data.nbytes]
        return room.copy_(data.view(torch.uint8)).view(incoming.dtype)

    def sent(self) -> None:
        self.owner.until(lambda: all(tracker.done for _, tracker in self.trackers))
