"""One rank's knowledge of one peer: the DEALER to it, the monitor of that DEALER, and what came from it.

Caller: `zeromq.py`. Everything runs on the transport's thread.

Two connections join a pair of ranks, one per direction. Ours to the peer has a monitor: when it breaks, by a dead
process or by missed heartbeats, the peer is `cut`. What the peer sent before may still be on its way over the other
connection, so it counts as lost only when that one has ended too.
"""

from __future__ import annotations

import struct
import time
from collections import deque
from typing import NamedTuple

import torch
import zmq
from torch import Tensor

from laconic.errors import PayloadError
from laconic.transports.zeromq_keys import Guard
from laconic.transports.zeromq_wire import CHUNK_NBYTES, Address, Header, Kind, dtype_of, identity

_EVENT = struct.Struct("=hi")
_REFUSALS = int(
    zmq.Event.HANDSHAKE_FAILED_NO_DETAIL | zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH
)
_WATCHED = _REFUSALS | int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED)
# Below this, letting ZeroMQ copy a slice is cheaper than hearing from it when the slice is free again.
_COPY_NBYTES = 65536

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]


class Arrival(NamedTuple):
    """A message, or one chunk of it, taken in and not yet asked for."""

    header: Header
    text: str
    payload: memoryview


class Peer:
    """Another rank, and our connection to it.

    Attributes:
        queue: chunks of collectives, in the order sent.
        greeted: its hello has come.
        established: our connection to it stood.
        refusals: handshakes it refused in a row.
        cut_at: when our connection to it broke, or None.
        left: it said goodbye.
        thanked: it has taken in our goodbye.
        signature: the last collective it was known to be in.
        signed: the last of our calls whose signature it was sent.
    """

    def __init__(self, rank: int, address: Address, own_rank: int, own_token: bytes) -> None:
        self.rank = rank
        self.address = address
        self.name = identity(own_token, rank)
        self.queue: deque[Arrival] = deque()
        self.greeted = False
        self.established = False
        self.refusals = 0
        self._refused_at = 0.0
        self.cut_at: float | None = None
        self.left = False
        self.heard_at = time.monotonic()
        self.signature = ""
        self.signed = -1
        self._parcel: Tensor | None = None
        self._grown = 0
        self.thanked = False
        self._farewell: zmq.MessageTracker | None = None
        self.dealer: Socket | None = None
        self._monitor: Socket | None = None
        self._own_name = identity(address.token, own_rank)

    def connect(self, context: Context, guard: Guard, heartbeat_s: float, silence_s: float) -> None:
        """Open the DEALER and its monitor; ZeroMQ connects, and connects again, in the background."""
        dealer = context.socket(zmq.DEALER)
        self.dealer = dealer
        dealer.setsockopt(zmq.ROUTING_ID, self._own_name)
        dealer.setsockopt(zmq.LINGER, 200)  # for the kernel; the farewell is waited for before closing
        dealer.copy_threshold = _COPY_NBYTES
        set_heartbeat(dealer, heartbeat_s, silence_s)
        dealer.setsockopt(zmq.IPV6, ":" in self.address.host)
        guard.client(dealer)
        place = f"inproc://peer-{id(self)}"
        dealer.monitor(place, _WATCHED)
        self._monitor = context.socket(zmq.PAIR)
        self._monitor.setsockopt(zmq.RCVHWM, 0)  # a full monitor would stop ZeroMQ's I/O thread
        self._monitor.setsockopt(zmq.LINGER, 0)
        self._monitor.connect(place)
        dealer.connect(self.address.endpoint)

    def watch(self) -> None:
        """Read what the monitor has seen; an established connection that broke is given up at once."""
        while self._monitor is not None:
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            number, _ = _EVENT.unpack(event)
            if number & _REFUSALS:
                self.refusals += 1
                self._refused_at = time.monotonic()
            elif number == zmq.Event.HANDSHAKE_SUCCEEDED:
                self.established, self.refusals = True, 0
            elif self.established:
                self.cut_at = time.monotonic()
                self.disconnect(linger=False)

    @property
    def refuses(self) -> bool:
        """Whether it will not have our key: it refused several times, or once and was not seen again."""
        return self.refusals > 2 or (self.refusals > 0 and time.monotonic() - self._refused_at > 1.0)

    def bid_farewell(self) -> None:
        """Send the last message, and track it."""
        if self.dealer is not None:
            self.dealer.copy_threshold = 0
            try:
                self._farewell = self.dealer.send(Header(Kind.BYE).pack(), zmq.NOBLOCK, copy=False, track=True)
            except zmq.Again:
                self._farewell = None

    def is_taking_leave(self, *, thanks: bool) -> bool:
        """Whether the farewell is on its way to a peer that may take it, or has not been thanked for."""
        if self._farewell is None or self.dealer is None or self.left or self.refusals:
            return False
        return not self._farewell.done or (thanks and not self.thanked)

    @property
    def obituary(self) -> str:
        """Why nothing more can be had from it."""
        if self.left:
            return f"peer {self.rank} has left: it closed its transport"
        return f"peer {self.rank} is lost: its connection broke, or it gave no sign of life"

    def grow(self, header: Header, payload: memoryview) -> Tensor | None:
        """Add a chunk to the parcel under way; returns the tensor when that completes it.

        Raises:
            PayloadError: a chunk out of order, or not a whole number of values.
        """
        dtype = dtype_of(header.round)
        first = header.chunk * CHUNK_NBYTES
        if first == 0 and header.nbytes % dtype.itemsize == 0:
            self._parcel, self._grown = torch.empty(header.nbytes, dtype=torch.uint8), 0
        whole = self._parcel
        if whole is None or whole.numel() != header.nbytes or first != self._grown:
            self._parcel = None
            raise PayloadError("a chunk that does not continue its parcel")
        if payload.nbytes:
            whole[first : first + payload.nbytes] = torch.frombuffer(payload, dtype=torch.uint8)
        self._grown = first + payload.nbytes
        if self._grown < header.nbytes:
            return None
        self._parcel = None
        return whole.view(dtype)

    def disconnect(self, *, linger: bool = True) -> None:
        """Close the DEALER; without linger what is queued is dropped and its memory released."""
        if self.dealer is None or self._monitor is None:
            return
        self.dealer.disable_monitor()
        self._monitor.close()
        if linger:
            self.dealer.close()
        else:
            self.dealer.close(0)
        self.dealer = self._monitor = None


def set_heartbeat(sock: Socket, heartbeat_s: float, silence_s: float) -> None:
    """Let ZeroMQ's I/O thread ask every `heartbeat_s` and give a connection up after `silence_s` without any answer."""
    sock.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_s * 1000)))
    sock.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(silence_s * 1000)))
