"""Authentication: a rank's secrets, derived from the job's key, and the gate that keeps strangers from its ROUTER.

Callers: `zeromq_mesh.py` and `zeromq_peer.py`. ZeroMQ limits a frame, not a message of many frames, so a peer that gets
through the handshake can fill our memory. The handshake needs the password of this address, or with CURVE the key. So
strangers can make us hold one frame per connection (1 MiB), for as long as a handshake may take (30 s), and at most
MAX_STRANGERS of them are connected at a time.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import logging
import os
import secrets
import socket
import struct
import threading
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import zmq
from zmq.utils import z85

from laconic.transports.zeromq_address import NONCE_NBYTES, SEAL_NBYTES, Address
from laconic.transports.zeromq_keys import checked_key, is_loopback, loopback_key

Socket = zmq.Socket[bytes]
Context = zmq.Context[Socket]

MAX_STRANGERS = 128
# ZeroMQ greets everybody with 64 bytes, and refuses with a few more; whoever was let in has been sent more than 110.
_GREETING_NBYTES = 80
_BYTES_SENT = struct.Struct("=200xQ")  # tcpi_bytes_sent in Linux's tcp_info, since 4.19
EVENT = struct.Struct("=Hi")
_WATCHED = int(zmq.Event.ACCEPTED | zmq.Event.DISCONNECTED | zmq.Event.HANDSHAKE_FAILED_PROTOCOL)
_log = logging.getLogger("laconic.transports")


@dataclass(frozen=True)
class Secret:
    """A rank's credentials, and those it demands of others; derived from the job's key.

    With CURVE one can neither read, nor speak, nor finish a handshake without the key. Otherwise whoever connects gives
    a password, which fits one address only and so is of no use to whoever may listen there by now. Every address
    carries a seal that only holders of the key can make.

    Attributes:
        key: the job's key; empty where there is none, and whoever learns an address may then speak to it.
        encrypts: whether traffic is encrypted by CURVE.
    """

    key: bytes
    encrypts: bool

    def sealed(self, host: str, port: int) -> Address:
        """A new address for a rank that listens there."""
        nonce = secrets.token_bytes(NONCE_NBYTES)
        return Address(host, port, nonce + self._code("seal", f"{host}:{port}:{nonce.hex()}"))

    def has_sealed(self, address: Address) -> bool:
        """Whether an address was made by a holder of the key."""
        nonce, seal = address.token[:NONCE_NBYTES], address.token[NONCE_NBYTES:]
        return hmac.compare_digest(seal, self._code("seal", f"{address.host}:{address.port}:{nonce.hex()}"))

    def server(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket that binds demand the key; a `Gate` answers for it."""
        sock.setsockopt(zmq.ZAP_DOMAIN, b"laconic")
        if self.encrypts:
            sock.setsockopt(zmq.CURVE_SERVER, 1)
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._curve_secret())
        else:
            sock.setsockopt(zmq.PLAIN_SERVER, 1)

    def client(self, sock: zmq.Socket[bytes], address: Address) -> None:
        """Make a socket that connects to `address` present the key."""
        if self.encrypts:
            secret = self._curve_secret()
            public = zmq.curve_public(secret)
            sock.setsockopt(zmq.CURVE_SERVERKEY, public)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, public)
            sock.setsockopt(zmq.CURVE_SECRETKEY, secret)
        else:
            sock.setsockopt(zmq.PLAIN_USERNAME, b"rank")
            sock.setsockopt(zmq.PLAIN_PASSWORD, self._password(address))

    def admits(self, address: Address, mechanism: bytes, credentials: list[bytes]) -> bool:
        """Whether a peer with these credentials (see ZeroMQ's RFC 27) may speak to the rank at `address`."""
        if self.encrypts:
            expected = z85.decode(zmq.curve_public(self._curve_secret()))
            return mechanism == b"CURVE" and hmac.compare_digest(b"".join(credentials), expected)
        return mechanism == b"PLAIN" and hmac.compare_digest(b"".join(credentials[1:]), self._password(address))

    def _password(self, address: Address) -> bytes:
        return self._code("password", str(address)).hex().encode()

    def _code(self, purpose: str, text: str) -> bytes:
        key = hashlib.blake2b(self.key, digest_size=32, person=b"laconic-admit").digest()
        return hashlib.blake2b(text.encode(), key=key, digest_size=SEAL_NBYTES, person=purpose.encode()).digest()

    def _curve_secret(self) -> bytes:
        return z85.encode(hashlib.blake2b(self.key, digest_size=32, person=b"laconic-curve").digest())


class Credentials(Protocol):
    """What a rank shows, and demands of others: `Secret`, of a key that all share, or `MemberSecret`, of its own."""

    def sealed(self, host: str, port: int) -> Address:
        """A new address for a rank that listens there."""

    def has_sealed(self, address: Address) -> bool:
        """Whether an address was made by somebody who may take part."""

    def server(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket that binds demand credentials; a `Gate` answers for it."""

    def client(self, sock: zmq.Socket[bytes], address: Address) -> None:
        """Make a socket that connects to `address` present them."""

    def admits(self, address: Address, mechanism: bytes, credentials: list[bytes]) -> bool:
        """Whether a peer with these credentials (see ZeroMQ's RFC 27) may speak to the rank at `address`."""


def secret_for(key: bytes | Credentials | None, host: str) -> Credentials:
    """A rank's secret: of the job's key; on loopback, when there is none, of the user's own; else empty."""
    if key is not None and not isinstance(key, bytes):
        return key
    if key is not None:
        return Secret(checked_key(key, "the job's key"), encrypts=True)
    return Secret((loopback_key() if is_loopback(host) else None) or b"", encrypts=False)


def monitor(context: Context, watched: Socket, place: str, events: int) -> Socket:
    """A socket that reports events of another's connections: EVENT, then the address."""
    watched.monitor(place, events)
    reader = context.socket(zmq.PAIR)
    reader.setsockopt(zmq.RCVHWM, 0)  # a full monitor would stop ZeroMQ's I/O thread
    reader.setsockopt(zmq.LINGER, 0)
    reader.connect(place)
    return reader


class Gate:
    """A thread that authenticates connections to a ROUTER (by ZAP, RFC 27), and cuts strangers that loiter.

    Args:
        router: bound, and made a server by `secret`.

    Attributes:
        address: at which others know this rank.
    """

    def __init__(self, context: Context, router: Socket, secret: Credentials, address: Address) -> None:
        self._secret = secret
        self.address, self._port = address, address.port
        self._refused = 0
        self._visitors: dict[int, Any] = {}  # their names by file descriptor, the oldest first
        self._router = router
        self._zap = context.socket(zmq.REP)
        self._zap.bind("inproc://zeromq.zap.01")
        self._monitor = monitor(context, router, "inproc://gate-monitor", _WATCHED)
        self._bell, self._ring = context.socket(zmq.PAIR), context.socket(zmq.PAIR)
        self._bell.bind("inproc://gate-bell")
        self._ring.connect("inproc://gate-bell")
        for each in (self._zap, self._bell, self._ring):
            each.setsockopt(zmq.LINGER, 0)
        self._thread = threading.Thread(target=self._run, name="laconic-gate", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop the thread; safe to call twice."""
        if not self._ring.closed:
            self._router.disable_monitor()  # first: ZeroMQ waits for ever where nobody reads a monitor
            self._ring.send(b"")
            self._thread.join()
            self._ring.close()

    def _run(self) -> None:
        poller = zmq.Poller()
        for each in (self._zap, self._monitor, self._bell):
            poller.register(each, zmq.POLLIN)
        while self._bell not in (ready := dict(poller.poll())):
            if self._zap in ready:
                self._answer()
            if self._monitor in ready:
                self._note(*EVENT.unpack(self._monitor.recv_multipart()[0]))
        for each in (self._zap, self._monitor, self._bell):
            each.close()

    def _answer(self) -> None:
        version, request, _, origin, _, mechanism, *credentials = self._zap.recv_multipart()
        fine = self._secret.admits(self.address, mechanism, credentials)
        if not fine:
            self._refuse(origin.decode(errors="replace"), "it does not hold the job's key")
        code, text = (b"200", b"") if fine else (b"400", b"this job has another key")
        self._zap.send_multipart([version, request, code, text, b"", b""])

    def _note(self, event: int, descriptor: int) -> None:
        """Update the list of connections; if too many are strangers, cut the oldest."""
        if event == zmq.Event.HANDSHAKE_FAILED_PROTOCOL:
            self._refuse("somebody", "it does not speak as holders of the job's key do")
            return
        self._visitors.pop(descriptor, None)
        if event != zmq.Event.ACCEPTED or (seen := _look(descriptor, self._port)) is None:
            return
        self._visitors[descriptor] = seen.name
        if len(self._visitors) > MAX_STRANGERS:
            strangers = [number for number, name in self._visitors.items() if self._is_stranger(number, name)]
            for number in strangers[: len(strangers) - MAX_STRANGERS]:
                self._refuse(str(self._visitors[number][0]), "too many connect without a word")
                _cut(number)

    def _is_stranger(self, descriptor: int, name: Any) -> bool:
        """Whether this connection has not got through the handshake; ZeroMQ does not tell, what it sent does."""
        seen = _look(descriptor, self._port)
        return seen is not None and seen.name == name and seen.sent_nbytes <= _GREETING_NBYTES

    def _refuse(self, origin: str, why: str) -> None:
        """Log the first refusal, the tenth, the hundredth and so on: a stranger must not fill the disk either."""
        self._refused += 1
        if str(self._refused).strip("0") == "1":
            _log.warning("%s: refused %d so far, now from %s: %s", self.address.endpoint, self._refused, origin, why)


class _Visitor(NamedTuple):
    """The other end of a connection, and the bytes it was sent."""

    name: Any
    sent_nbytes: int


def _look(descriptor: int, port: int) -> _Visitor | None:
    """Who is connected by one of ZeroMQ's descriptors; None when that is no longer a connection to our port."""
    try:
        with _borrowed(descriptor) as connection:
            if connection.getsockname()[1] != port:
                return None
            facts = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _BYTES_SENT.size)
            return _Visitor(connection.getpeername(), *_BYTES_SENT.unpack(facts))
    except (OSError, AttributeError, struct.error):  # closed meanwhile, or a system without TCP_INFO
        return None


def _cut(descriptor: int) -> None:
    """End a connection as its other end might; ZeroMQ then closes it."""
    with contextlib.suppress(OSError), _borrowed(descriptor) as connection:
        connection.shutdown(socket.SHUT_RDWR)


def _borrowed(descriptor: int) -> socket.socket:
    own = os.dup(descriptor)
    try:
        return socket.socket(fileno=own)
    except OSError:
        os.close(own)
        raise
