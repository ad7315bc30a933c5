"""The job's key: who may take part in a ZeroMQ job, and how its traffic is encrypted.

Callers: `zeromq_mesh.py` guards its sockets here; launchers make and read keys. All ranks of a job hold the same secret
and derive from it the same CURVE key pair, as server and as client: without the secret one can neither read, nor speak,
nor finish a handshake.
"""

from __future__ import annotations

import hashlib
import hmac
import ipaddress
import os
import secrets
import socket
import stat
from pathlib import Path
from typing import Any

import zmq
from zmq.auth.thread import ThreadAuthenticator
from zmq.utils import z85

from laconic.errors import BadInput

KEY_VARIABLE = "LACONIC_KEY"
_MIN_KEY_NBYTES = 16


def new_key() -> bytes:
    """A fresh job key: 64 hexadecimal digits, 256 random bits; fit for LACONIC_KEY or a key file.

    >>> len(new_key())
    64
    """
    return secrets.token_hex(32).encode()


def read_key(path: str | Path | None = None) -> bytes | None:
    """The job's key from the file `path`, else from LACONIC_KEY, else None.

    Raises:
        BadInput: the file cannot be read or is readable by every user, or the key is shorter than 16 bytes.
    """
    if path is None:
        text = os.environ.get(KEY_VARIABLE)
        if text is None:
            return None
        return _checked(text.strip().encode(), f"the key in {KEY_VARIABLE}")
    try:
        mode = os.stat(path).st_mode
        content = Path(path).read_bytes()
    except OSError as error:
        raise BadInput(f"the key file {path} cannot be read: {error.strerror}") from None
    if mode & (stat.S_IROTH | stat.S_IWOTH):
        raise BadInput(f"the key file {path} is open to every user of this machine; run: chmod 600 {path}")
    return _checked(content.strip(), f"the key in {path}")


def _checked(key: bytes, what: str) -> bytes:
    if len(key) < _MIN_KEY_NBYTES:
        raise BadInput(f"{what} has {len(key)} bytes; a key needs at least {_MIN_KEY_NBYTES}")
    return key


class Guard:
    """Puts CURVE on sockets when there is a key, and admits only holders of it; without a key it does nothing.

    The handshake already fails for whoever does not know the derived server key; the authenticator (ZeroMQ's
    ZAP, a thread in `context`) moreover compares the client's key.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], key: bytes | None) -> None:
        self._authenticator: Any = None
        self._secret = self._public = b""
        if key is None:
            return
        digest = hashlib.blake2b(_checked(key, "the job's key"), digest_size=32, person=b"laconic-curve").digest()
        self._secret = z85.encode(digest)
        self._public = zmq.curve_public(self._secret)
        self._authenticator = ThreadAuthenticator(context)
        self._authenticator.start()
        self._authenticator.configure_curve_callback(domain="*", credentials_provider=self)

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a client with this public key may connect; asked by the authenticator."""
        return hmac.compare_digest(key, self._public)

    def server(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket that binds demand the key."""
        if self._secret:
            sock.setsockopt(zmq.CURVE_SERVER, 1)
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def client(self, sock: zmq.Socket[bytes]) -> None:
        """Make a socket that connects present the key."""
        if self._secret:
            sock.setsockopt(zmq.CURVE_SERVERKEY, self._public)
            sock.setsockopt(zmq.CURVE_PUBLICKEY, self._public)
            sock.setsockopt(zmq.CURVE_SECRETKEY, self._secret)

    def close(self) -> None:
        """Stop the authenticator's thread."""
        if self._authenticator is not None:
            self._authenticator.stop()
            self._authenticator = None


def host_to_bind(bind: str) -> str:
    """The numeric address behind `bind`, or the interface it names.

    Raises:
        BadInput: an unknown host, or a wildcard, which other ranks could not connect to.
    """
    try:
        address = ipaddress.ip_address(bind)
    except ValueError:
        if bind in {name for _, name in socket.if_nameindex()}:
            return bind
        try:
            return socket.gethostbyname(bind)
        except OSError:
            raise BadInput(f"cannot bind to '{bind}': neither an address, an interface nor a known host") from None
    if address.is_unspecified:
        raise BadInput(f"cannot advertise {bind}; bind to the address at which the other hosts reach this one")
    return bind


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach `host`, an address or the interface `lo`."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "lo"
