"""A rank's sockets and peers: their messages, and whether they are alive. Knows nothing of collectives.

Caller: `zeromq.py`, which hands in where checked messages go.

One ROUTER receives from all peers; a DEALER per peer sends, or several where one connection does not fill the link.
Messages that are malformed, or not from a rank of the job, are dropped and counted.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import zmq

from laconic.errors import BadInput, NotAuthorised, PayloadError
from laconic.transports.frame import HEADER_NBYTES, MAX_FRAME_NBYTES, Arrival, EngineKind, Header, unpack
from laconic.transports.zeromq_address import Address, Speaker, speaker
from laconic.transports.zeromq_gate import Context, Credentials, Gate
from laconic.transports.zeromq_keys import KEY_VARIABLE
from laconic.transports.zeromq_peer import Peer
from laconic.transports.zeromq_stripes import NUMBER, InOrder

# How long one look at the ROUTER lasts before monitors and deadlines are looked at again.
TICK_S = 0.01
# Chunks that wait unread per connection.
_RECEIVE_QUEUE = 64
# What a peer sent before its connection broke, and is still on the way, must arrive within this.
_GRACE_S = 1.0


@dataclass(frozen=True)
class Patience:
    """How long to wait for peers.

    Attributes:
        heartbeat_s: how often a connection is asked for a sign of life.
        silence_s: without any for so long a peer counts as lost; None: a third of the time-out, at most 5 s.
        linger_s: how long closing waits at most until the others have taken in what was sent.
    """

    heartbeat_s: float = 0.5
    silence_s: float | None = None
    linger_s: float = 5.0

    def within(self, timeout_s: float) -> Patience:
        """With a silence that is known, and a linger below the time-out."""
        silence_s = min(timeout_s / 3, 5.0) if self.silence_s is None else self.silence_s
        return Patience(self.heartbeat_s, silence_s, min(self.linger_s, timeout_s))


PATIENCE = Patience()


class Mesh:
    """The sockets of one rank.

    Attributes:
        address: where others find this rank: where it listens, or what it advertises.
        listens_at: host and port of its socket.
        peers: by rank, the lost and the departed included until they are dropped.
        rejected: messages dropped.
        connections: for the payloads to each peer.
    """

    def __init__(
        self,
        rank: int,
        host: str,
        secret: Credentials,
        patience: Patience,
        deliver: Callable[[Peer, Arrival], None],
        connections: int = 1,
    ) -> None:
        self.rank = rank
        self.peers: dict[int, Peer] = {}
        self.rejected = 0
        self.connections = connections
        self._streams: dict[Speaker, _Stream] = {}  # of peers that speak over several connections
        self._patience = patience
        self._deliver = deliver
        self._secret = secret
        self._watched_at = 0.0
        self._context: Context = zmq.Context()
        self._context.set(zmq.MAX_SOCKETS, self._context.get(zmq.SOCKET_LIMIT))  # by default those of 170 peers
        self._router = self._context.socket(zmq.ROUTER)
        try:
            self._bind(host)
            self.address = self._own_address()
            self.listens_at = self.address.host, self.address.port
            self._gate = Gate(self._context, self._router, secret, self.address)
        except BaseException:
            self._router.disable_monitor()  # first: ZeroMQ waits for ever where nobody reads a monitor
            self._context.destroy(0)
            raise

    def _bind(self, host: str) -> None:
        router = self._router
        router.setsockopt(zmq.LINGER, 0)
        router.setsockopt(zmq.RCVTIMEO, int(TICK_S * 1000))
        router.setsockopt(zmq.RCVHWM, _RECEIVE_QUEUE)
        router.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_NBYTES)
        router.setsockopt(zmq.BACKLOG, 1024)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending tells whether a peer's connection still stands
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)  # a rank that comes back replaces its old connection
        router.setsockopt(zmq.IPV6, ":" in host)
        self._secret.server(router)
        try:
            router.bind(f"tcp://[{host}]:*" if ":" in host else f"tcp://{host}:*")
        except zmq.ZMQError as error:
            raise BadInput(f"cannot bind to '{host}': {error.strerror}") from None

    def _own_address(self) -> Address:
        host, port = self._router.getsockopt_string(zmq.LAST_ENDPOINT).removeprefix("tcp://").rsplit(":", 1)
        return self._secret.sealed(host.strip("[]"), int(port))

    def advertise(self, host: str, port: int) -> None:
        """Advertise another address than the one this rank listens at, as of a relay; before meeting any peer."""
        self.address = self._secret.sealed(host, port)
        self._gate.address = self.address

    def add(self, rank: int, address: Address) -> Peer:
        """Connect to a rank and say hello; an older acquaintance of that number is dropped.

        Raises:
            NotAuthorised: the address was made with another key.
        """
        if not self._secret.has_sealed(address):
            text = f"[rank {self.rank}] zmq: the address of peer {rank} was made with another key"
            cure = f"do all ranks have the same {KEY_VARIABLE} or key file, or without one the same user?"
            raise NotAuthorised(f"{text}; {cure}", rank=self.rank, peer=rank)
        self.drop(rank)
        peer = Peer(rank, address, self.rank, self.address.token)
        wait = self._patience
        peer.connect(self._context, self._secret, wait.heartbeat_s, wait.silence_s or 5.0, self.connections)
        self.peers[rank] = peer
        self.greet(peer)
        return peer

    def greet(self, peer: Peer) -> None:
        """Say hello: a peer that does not know this rank, or has forgotten it, connects to it and says hello back."""
        self.say(peer, Header(EngineKind.HELLO), str(self.address))

    def drop(self, rank: int) -> None:
        """Say goodbye to a rank and forget it."""
        peer = self.peers.pop(rank, None)
        if peer is not None:
            self._leave([peer], thanks=False)

    def close(self) -> None:
        """Say goodbye to all, release every socket and thread; takes patience.linger_s at most."""
        self._leave(list(self.peers.values()), thanks=True)
        for peer in self.peers.values():
            peer.disconnect(linger=False)  # who has said hello meanwhile
        self._gate.close()
        self._context.destroy(0)  # term() would wait for ever for a socket of a connection that failed half-way

    def _leave(self, peers: list[Peer], *, thanks: bool) -> None:
        """Say goodbye and wait until that is out, or taken in; a peer that is gone is not waited for.

        To a peer that has yet to read, over a slow link, our closed sockets would look like death.
        """
        deadline = time.monotonic() + self._patience.linger_s
        while self.take_in(block=False) and time.monotonic() < deadline:
            pass  # a peer may have left before us
        waiting = [peer for peer in peers if not peer.left]
        for peer in waiting:
            peer.bid_farewell()
        while any(peer.is_taking_leave(thanks=thanks) for peer in waiting) and time.monotonic() < deadline:
            if not self.take_in(block=False):
                time.sleep(TICK_S / 10)
            for peer in waiting:
                peer.watch()  # one that has died takes no farewell; `drop` has taken it out of those that are looked at
        for peer in peers:
            peer.disconnect(linger=peer in waiting and not peer.is_taking_leave(thanks=False))

    # sending

    def say(self, peer: Peer, header: Header, text: str = "") -> bool:
        """Send a short message to a peer if that is possible at once; else return False."""
        if peer.dealer is None:
            return False
        try:
            peer.send(header.pack(text))
        except zmq.Again:
            return False
        return True

    # receiving

    def take_in(self, *, block: bool = True) -> bool:
        """Receive one message, waiting a tick at most; False if none came. Also reads the monitors."""
        router = self._router
        try:
            name = router.recv(0 if block else zmq.NOBLOCK)
        except zmq.Again:
            self._watch()
            return False
        who = speaker(name, self.address.token)
        number = router.recv() if who is not None and who.stream and router.getsockopt(zmq.RCVMORE) else b""
        head = router.recv() if router.getsockopt(zmq.RCVMORE) else b""
        body: zmq.Frame | None = None
        parts = 0
        while router.getsockopt(zmq.RCVMORE):
            body = router.recv(copy=False)
            parts += 1
        try:
            if parts > 1:
                raise PayloadError("a message has one payload")
            if who is None or who.rank == self.rank:
                raise PayloadError("from a stranger")
            self._put_in_order(name, who, number, _checked(head, body))
        except (PayloadError, NotAuthorised):
            self.rejected += 1
        if time.monotonic() - self._watched_at > TICK_S:
            self._watch()
        return True

    def _put_in_order(self, name: bytes, who: Speaker, number: bytes, arrival: Arrival) -> None:
        """Pass on a message, and those that have waited for it; hold one that came before its turn."""
        if not who.stream:
            return self._file(who, {name}, arrival)
        if len(number) != NUMBER.size:
            raise PayloadError("a message without a number")
        if who not in self._streams:
            self._forget_streams(who.rank)
            self._streams[who] = _Stream()
        stream = self._streams[who]
        stream.names.add(name)
        if who.rank in self.peers:
            self.peers[who.rank].heard_at = time.monotonic()
        nbytes = arrival.payload.nbytes + HEADER_NBYTES + len(arrival.text)
        for each in stream.order.take(NUMBER.unpack(number)[0], arrival, nbytes):
            try:
                self._file(who, stream.names, each)
            except (PayloadError, NotAuthorised):
                self.rejected += 1

    def _forget_streams(self, rank: int) -> None:
        """Forget the streams of those that are gone, and of this rank all but the latest."""
        for who in [who for who, stream in self._streams.items() if not self._stands(stream.names)]:
            if who.rank not in self.peers:
                del self._streams[who]
        for who in [who for who in self._streams if who.rank == rank][:-1]:
            del self._streams[who]

    def _file(self, who: Speaker, names: set[bytes], arrival: Arrival) -> None:
        """Pass a message on; PayloadError if no rank of this job would send it."""
        rank, header = who.rank, arrival.header
        peer = self.peers.get(rank)
        if header.kind == EngineKind.HELLO:
            # A rank we do not know, or know at an older address, joins.
            if peer is None or str(peer.address) != arrival.text:
                peer = self.add(rank, Address.parse(arrival.text))
            peer.greeted, peer.names = True, names
        if peer is None:
            raise PayloadError("from a rank that is not a peer")
        peer.heard_at = time.monotonic()
        if header.kind == EngineKind.BYE:
            peer.left = True
            self.say(peer, Header(EngineKind.THANKS))
        elif header.kind == EngineKind.THANKS:
            peer.thanked = True
        elif header.kind != EngineKind.HELLO:
            self._deliver(peer, arrival)

    # liveness

    def _watch(self) -> None:
        self._watched_at = time.monotonic()
        for peer in self.peers.values():
            peer.watch()

    def is_over(self, peer: Peer, *, sending: bool = False) -> bool:
        """Whether nothing more can come from a peer beyond what has arrived, not even an acknowledgement."""
        if peer.left:
            return not sending or time.monotonic() - peer.heard_at > _GRACE_S
        if peer.cut_at is None:
            return peer.unreachable and not self._stands(peer.names)
        return time.monotonic() - max(peer.heard_at, peer.cut_at) > _GRACE_S or not self._stands(peer.names)

    def half_open(self) -> Peer | None:
        """A peer that no longer takes what we send although its own connection to us stands, if there is one."""
        now = time.monotonic()
        for peer in self.peers.values():
            if peer.cut_at is not None and not peer.left and now - peer.cut_at > _GRACE_S and self._stands(peer.names):
                return peer
        return None

    def _stands(self, names: set[bytes]) -> bool:
        """Whether one of a peer's connections to us stands: ROUTER refuses to send where there is none."""
        return any(self._is_connected(name) for name in names)

    def _is_connected(self, name: bytes) -> bool:
        try:
            self._router.send_multipart([name, b""], zmq.NOBLOCK)
        except zmq.Again:
            return True
        except zmq.ZMQError:
            return False
        return True


class _Stream:
    """The connections by which a peer speaks to us, and the one order of what comes over them."""

    def __init__(self) -> None:
        self.names: set[bytes] = set()
        self.order: InOrder[Arrival] = InOrder()


def _checked(head: bytes, body: zmq.Frame | None) -> Arrival:
    arrival = unpack(head)
    if body is not None:
        arrival = arrival._replace(payload=body.buffer)
    if arrival.payload.nbytes != arrival.header.chunk_nbytes:
        raise PayloadError("a chunk of the wrong length")
    return arrival
