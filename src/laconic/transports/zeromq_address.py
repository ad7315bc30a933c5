"""Where ZeroMQ ranks listen, and by which names they know each other.

Callers: the other files of the engine, and what asks whether a member's host is within reach.

A rank's token, random bytes and a seal (see `zeromq_gate.py`), stands in the address it advertises. Whoever connects
gives `L`, that token and its own rank as ZeroMQ identity, which ROUTER puts before every message.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass

from laconic.errors import PayloadError

NONCE_NBYTES = SEAL_NBYTES = 16
TOKEN_NBYTES = NONCE_NBYTES + SEAL_NBYTES
_IDENTITY = struct.Struct(f"<1s{TOKEN_NBYTES}sI")


def identity(token: bytes, rank: int) -> bytes:
    """The identity under which `rank` speaks to the owner of `token`."""
    return _IDENTITY.pack(b"L", token, rank)


def speaker(name: bytes, token: bytes) -> int | None:
    """The rank behind an identity, or None for a stranger: somebody who does not know our token.

    >>> speaker(identity(b"x" * 32, 3), b"x" * 32), speaker(b"stranger", b"x" * 32)
    (3, None)
    """
    if len(name) != _IDENTITY.size:
        return None
    letter, given, rank = _IDENTITY.unpack(name)
    return int(rank) if letter == b"L" and hmac.compare_digest(given, token) else None


@dataclass(frozen=True)
class Address:
    """Where a rank listens, and the token it wants to hear: `host:port:token` as text."""

    host: str
    port: int
    token: bytes

    def __str__(self) -> str:
        return f"{self.host}:{self.port}:{self.token.hex()}"

    @property
    def endpoint(self) -> str:
        """The address in ZeroMQ's spelling."""
        return f"tcp://{_bracketed(self.host)}:{self.port}"

    @classmethod
    def parse(cls, text: str) -> Address:
        """Read `host:port:token`; PayloadError for anything else.

        >>> Address.parse("127.0.0.1:5555:" + "00" * 32).endpoint
        'tcp://127.0.0.1:5555'
        """
        try:
            host, port, token = text.rsplit(":", 2)
            address = cls(host, int(port), bytes.fromhex(token))
        except ValueError:
            raise PayloadError(f"'{text[:80]}' is not an address host:port:token") from None
        if not host or not 0 < address.port < 65536 or len(address.token) != TOKEN_NBYTES:
            raise PayloadError(f"'{text[:80]}' is not an address host:port:token")
        return address


def _bracketed(host: str) -> str:
    return f"[{host}]" if ":" in host else host
