"""Where ZeroMQ ranks listen, and by which names they know each other.

Callers: the other files of the engine, and what asks whether a member's host is within reach.

A rank's token, random bytes and a seal (see `zeromq_gate.py`), stands in the address it advertises. Whoever connects
gives `L`, that token and its own rank as ZeroMQ identity, which ROUTER puts before every message. One that speaks over
several connections (`zeromq_stripes.py`) gives `S`, and adds a number of each and what it calls them all.
"""

from __future__ import annotations

import hmac
import struct
from dataclasses import dataclass
from typing import NamedTuple

from laconic.errors import PayloadError

NONCE_NBYTES = SEAL_NBYTES = 16
TOKEN_NBYTES = NONCE_NBYTES + SEAL_NBYTES
STREAM_NBYTES = 8
_IDENTITY = struct.Struct(f"<1s{TOKEN_NBYTES}sI")
_STRIPED = struct.Struct(f"<1s{TOKEN_NBYTES}sIB{STREAM_NBYTES}s")


def identity(token: bytes, rank: int, stream: bytes = b"", connection: int = 0) -> bytes:
    """The identity under which `rank` speaks to the owner of `token`, over one connection or a stream of several."""
    return _STRIPED.pack(b"S", token, rank, connection, stream) if stream else _IDENTITY.pack(b"L", token, rank)


class Speaker(NamedTuple):
    """Who speaks: a rank, and the stream that its connections make; empty where there is one connection."""

    rank: int
    stream: bytes = b""


def speaker(name: bytes, token: bytes) -> Speaker | None:
    """Who is behind an identity, or None for a stranger: somebody who does not know our token.

    >>> speaker(identity(b"x" * 32, 3), b"x" * 32), speaker(b"stranger", b"x" * 32)
    (Speaker(rank=3, stream=b''), None)
    """
    stream = b""
    if len(name) == _STRIPED.size:
        letter, given, rank, _, stream = _STRIPED.unpack(name)
    elif len(name) == _IDENTITY.size:
        letter, given, rank = _IDENTITY.unpack(name)
    else:
        return None
    known = letter == (b"S" if stream else b"L") and hmac.compare_digest(given, token)
    return Speaker(int(rank), stream) if known else None


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
