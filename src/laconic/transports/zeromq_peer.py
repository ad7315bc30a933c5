"""One rank's knowledge of one peer: the connections to it, whether they stand, and what came from it.

Callers: `zeromq_mesh.py` and `zeromq.py`. Everything runs on the transport's thread.

A rank has two connections to a peer: one for its messages, and a pulse that carries heartbeats only. ZeroMQ stops
reading a connection whose messages nobody takes, heartbeats included, so a rank that computes for long with a full
queue would look dead; on a slow link a heartbeat would wait behind the data. Where one connection does not fill the
link, there are several more for payloads (`zeromq_stripes.py`). When any connection breaks, by a dead process or by
missed heartbeats, the peer is `cut`. What it sent before may still be on its way over its own connections to us, so it
counts as lost only when they have ended too.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from collections import deque
from collections.abc import Iterator

import zmq

from laconic.transports.frame import Arrival, EngineKind, Growing, Header
from laconic.transports.zeromq_address import STREAM_NBYTES, Address, identity
from laconic.transports.zeromq_gate import EVENT, Context, Credentials, Socket, monitor
from laconic.transports.zeromq_stripes import NUMBER, QUEUE

# A handshake that fails without a detail was cut short: the peer has died, or is too busy to let us in yet.
_REFUSALS = int(zmq.Event.HANDSHAKE_FAILED_PROTOCOL | zmq.Event.HANDSHAKE_FAILED_AUTH)
_WATCHED = _REFUSALS | int(zmq.Event.HANDSHAKE_SUCCEEDED | zmq.Event.DISCONNECTED | zmq.Event.CONNECT_RETRIED)
# A rank listens before it tells its address, so one that refuses connections for this long has died.
_UNREACHABLE_S = 1.0
# Below this, letting ZeroMQ copy a slice is cheaper than hearing from it when the slice is free again.
_COPY_NBYTES = 65536
_log = logging.getLogger("laconic.transports")
_NUMBERS = itertools.count()  # of the process's lines


class Peer:
    """Another rank, and our connection to it.

    Attributes:
        names: by which it speaks to us, one for each of its connections.
        queue: chunks of collectives, in the order sent.
        growing: the message outside collectives that is coming.
        greeted: its hello has come.
        refuses: it rejects our key.
        cut_at: when our connection to it broke, or None.
        left: it said goodbye.
        thanked: it has acknowledged our goodbye.
        signature: the last collective it was known to be in.
        signed: the last of our calls whose signature it was sent.
    """

    def __init__(self, rank: int, address: Address, own_rank: int, own_token: bytes) -> None:
        self.rank = rank
        self.address = address
        self.names = {identity(own_token, rank)}
        self.queue: deque[Arrival] = deque()
        self.growing = Growing()
        self.greeted = False
        self.refuses = False
        self._tried_since: float | None = None  # connecting has failed from then on
        self.cut_at: float | None = None
        self.left = False
        self.heard_at = time.monotonic()
        self.signature = ""
        self.signed = -1
        self.thanked = False
        self._farewell: zmq.MessageTracker | None = None
        self.dealer: Socket | None = None
        self._lines: list[_Line] = []
        self._own_rank = own_rank
        self._lanes: list[Socket] = []  # for payloads, where there are several connections
        self._latest: dict[int, zmq.MessageTracker] = {}  # what went last, by lane
        self._numbered = 0  # messages sent
        self._turn = 0  # payloads sent

    def connect(
        self, context: Context, secret: Credentials, heartbeat_s: float, silence_s: float, connections: int
    ) -> None:
        """Open the DEALERs and the pulse; ZeroMQ connects, and connects again, in the background."""
        line, pulse = _Line(context), _Line(context)
        lanes = [_Line(context) for _ in range(connections if connections > 1 else 0)]
        self._lines = [line, pulse, *lanes]
        stream = secrets.token_bytes(STREAM_NBYTES) if lanes else b""
        for number, each in enumerate((line, *lanes)):
            each.socket.setsockopt(zmq.ROUTING_ID, identity(self.address.token, self._own_rank, stream, number))
            each.socket.setsockopt(zmq.LINGER, 200)  # for the kernel; the farewell is waited for before closing
            each.socket.copy_threshold = _COPY_NBYTES
        self.dealer, self._lanes = line.socket, [each.socket for each in lanes]
        for lane in self._lanes:
            lane.setsockopt(zmq.SNDHWM, QUEUE)
            lane.copy_threshold = 0  # all is tracked, so that leaving can wait for it
        pulse.socket.setsockopt(zmq.LINGER, 0)
        pulse.socket.setsockopt(zmq.HEARTBEAT_IVL, max(1, int(heartbeat_s * 1000)))
        pulse.socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, max(1, int(silence_s * 1000)))
        for each in self._lines:
            each.connect(self.address, secret)

    def watch(self) -> None:
        """Read the monitors' events; if an established connection broke, give up all at once."""
        for line in self._lines:
            for event in line.events():
                if event & _REFUSALS:
                    self.refuses = True
                    _log.warning("peer %d at %s refuses this rank's key", self.rank, self.address.endpoint)
                elif event == zmq.Event.HANDSHAKE_SUCCEEDED:
                    line.established, self.refuses, self._tried_since = True, False, None
                elif line.established:
                    self.cut_at = time.monotonic()
                    _log.info("the connection to peer %d at %s broke", self.rank, self.address.endpoint)
                elif event == zmq.Event.CONNECT_RETRIED and self._tried_since is None:
                    self._tried_since = time.monotonic()
                    _log.info("peer %d at %s cannot be reached; trying again", self.rank, self.address.endpoint)
        if self.cut_at is not None:
            self.disconnect(linger=False)

    @property
    def established(self) -> bool:
        """Whether all connections to it stand."""
        return bool(self._lines) and all(line.established for line in self._lines)

    @property
    def unreachable(self) -> bool:
        """Whether nobody listens at its address any more."""
        return self._tried_since is not None and time.monotonic() - self._tried_since > _UNREACHABLE_S

    def send(self, head: bytes, piece: memoryview | None = None) -> zmq.MessageTracker | None:
        """Hand a message to ZeroMQ; the tracker, if any, tells when `piece` may be written to again.

        Raises:
            zmq.Again: the queue of the connection whose turn it is, is full.
        """
        assert self.dealer is not None
        if piece is None:
            self._begin(self.dealer)
            self.dealer.send(head, zmq.NOBLOCK)
        else:
            lane = self._turn % len(self._lanes) if self._lanes else -1
            sock = self._lanes[lane] if self._lanes else self.dealer
            self._begin(sock)
            sock.send(head, zmq.NOBLOCK | zmq.SNDMORE)
            tracker = sock.send(piece, copy=False, track=True)
            self._turn += 1
            if self._lanes:
                self._latest[lane] = tracker
        self._numbered += 1
        return None if piece is None else tracker

    def _begin(self, sock: Socket) -> None:
        """Begin a message: with its number, where there are several connections. Raises zmq.Again."""
        if self._lanes:
            sock.send(NUMBER.pack(self._numbered), zmq.NOBLOCK | zmq.SNDMORE)

    def bid_farewell(self) -> None:
        """Send the last message, and track it."""
        if self.dealer is not None:
            self.dealer.copy_threshold = 0
            try:
                self._begin(self.dealer)
                self._farewell = self.dealer.send(Header(EngineKind.BYE).pack(), zmq.NOBLOCK, copy=False, track=True)
                self._numbered += 1
            except zmq.Again:
                self._farewell = None

    def is_taking_leave(self, *, thanks: bool) -> bool:
        """Whether the farewell, or a payload before it, is still in transit to a living peer, or not acknowledged."""
        if self._farewell is None or self.dealer is None or self.left:
            return False
        if self.refuses or self._tried_since is not None:
            return False
        out = self._farewell.done and all(tracker.done for tracker in self._latest.values())
        return not out or (thanks and not self.thanked)

    def why_gone(self, name: int) -> str:
        """Why nothing more can come from it; `name` is its job-wide number."""
        if self.left:
            return f"peer {name} has left: it closed its transport"
        if self.unreachable:
            return f"peer {name} is lost: nobody listens at its address any more"
        return f"peer {name} is lost: its connection broke, or it gave no sign of life"

    def disconnect(self, *, linger: bool) -> None:
        """Close all connections; without linger what is queued is dropped and its memory released."""
        lines, self._lines, self._lanes, self.dealer = self._lines, [], [], None
        for line in lines:
            line.close(linger=linger)


class _Line:
    """A DEALER with the monitor that sees it connect and break."""

    def __init__(self, context: Context) -> None:
        self.socket: Socket = context.socket(zmq.DEALER)
        self.established = False
        place = f"inproc://line-{next(_NUMBERS)}"  # an id() may be that of one whose monitor is yet to close
        self._monitor = monitor(context, self.socket, place, _WATCHED)

    def connect(self, address: Address, secret: Credentials) -> None:
        secret.client(self.socket, address)
        self.socket.setsockopt(zmq.IPV6, ":" in address.host)
        self.socket.connect(address.endpoint)

    def events(self) -> Iterator[int]:
        """The events since the last call."""
        while True:
            try:
                event, _ = self._monitor.recv_multipart(zmq.NOBLOCK)
            except zmq.Again:
                return
            yield EVENT.unpack(event)[0]

    def close(self, *, linger: bool) -> None:
        self.socket.disable_monitor()
        self._monitor.close()
        self.socket.close(None if linger else 0)
