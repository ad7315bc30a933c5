"""What ZeroMQ ranks say to each other: addresses, identities and the fixed header before every payload.

Callers: the other files of the engine. Nothing here opens a socket, and nothing is pickled.

A rank's token, random bytes and a seal (see `zeromq_gate.py`), stands in the address it advertises. Whoever connects
gives `L`, that token and its own rank as ZeroMQ identity, which ROUTER puts before every message. A message is then one
frame, header | text | payload, or two, header | text and payload; a long slice comes as several, in order. All numbers
are little-endian.
"""

from __future__ import annotations

import hmac
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import torch
from torch import Tensor

from laconic.errors import BadInput, CollectiveTimeout, Mismatch, PayloadError, PeerLost, TransportError

NONCE_NBYTES = SEAL_NBYTES = 16
TOKEN_NBYTES = NONCE_NBYTES + SEAL_NBYTES
# Every chunk that comes shows that a long slice gets on: 1 MiB takes 0.8 s at 10 Mbit/s. Longer frames would also let
# strangers fill more memory. On loopback 0.5–4 MiB are equally fast.
CHUNK_NBYTES = 1 << 20
# A second frame costs more than copying this much.
INLINE_NBYTES = 4096
# ROUTER drops connections that announce a longer frame; CURVE adds some bytes to each.
MAX_FRAME_NBYTES = CHUNK_NBYTES + 1024

_HEADER = struct.Struct("<4sBBHQIIIQ")
HEADER_NBYTES = _HEADER.size
_IDENTITY = struct.Struct(f"<1s{TOKEN_NBYTES}sI")
_MAGIC = b"LacZ"
_VERSION = 1
_MAX_NBYTES = 1 << 48
_MAX_TEXT_NBYTES = 2048

_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip


class Kind(IntEnum):
    """What a message is for."""

    HELLO = 1  # text: the sender's address
    DATA = 2  # a slice of a collective; text, in the first of a call to a peer: the call's signature
    FAULT = 3  # the sender fails; code: one of FAULTS, round: the culprit's rank, text: the reason
    BYE = 4  # the sender leaves
    PARCEL = 5  # a tensor outside collectives; code: its tag, round: its dtype
    THANKS = 6  # the receiver's goodbye, and so all before it, has been taken in


# Why a rank gives up, as told to the others.
FAULTS: dict[type[TransportError], int] = {PeerLost: 1, Mismatch: 2, CollectiveTimeout: 3}
ERRORS = {number: error for error, number in FAULTS.items()}


class Header(NamedTuple):
    """The fixed part of a message. `nbytes` is the whole slice, `chunk` which piece of it follows."""

    kind: Kind
    sequence: int = 0
    code: int = 0
    round: int = 0
    chunk: int = 0
    nbytes: int = 0

    def pack(self, text: str = "") -> bytes:
        """Header and text as bytes; a text too long is cut.

        >>> unpack(Header(Kind.DATA, 7, 1, 2, 0, 40).pack("ring")).header.sequence
        7
        """
        tail = text.encode()[:_MAX_TEXT_NBYTES]
        head = _HEADER.pack(
            _MAGIC, _VERSION, self.kind, len(tail), self.sequence, self.code, self.round, self.chunk, self.nbytes
        )
        return head + tail


class Arrival(NamedTuple):
    """A message, or one chunk of it, taken in and not yet asked for."""

    header: Header
    text: str
    payload: memoryview


def unpack(frame: bytes) -> Arrival:
    """Take a first frame apart; the payload is what follows header and text.

    Raises:
        PayloadError: too short, another magic or version, an unknown kind, or lengths that contradict each other.
    """
    if len(frame) < HEADER_NBYTES:
        raise PayloadError(f"a header has {HEADER_NBYTES} bytes, this frame {len(frame)}")
    magic, version, kind, text_nbytes, sequence, code, round, chunk, nbytes = _HEADER.unpack_from(frame)
    if magic != _MAGIC or version != _VERSION:
        raise PayloadError(f"not a version {_VERSION} header")
    if kind not in _KINDS or text_nbytes > _MAX_TEXT_NBYTES or nbytes > _MAX_NBYTES:
        raise PayloadError("a header with an unknown kind or an impossible length")
    end = HEADER_NBYTES + text_nbytes
    if len(frame) < end:
        raise PayloadError(f"a text of {text_nbytes} bytes was announced, {len(frame) - HEADER_NBYTES} came")
    text = frame[HEADER_NBYTES:end].decode(errors="replace") if text_nbytes else ""
    header = Header(_KINDS[kind], sequence, code, round, chunk, nbytes)
    return Arrival(header, text, memoryview(bytearray(frame[end:])))  # writable, as torch wants it


_KINDS = {int(kind): kind for kind in Kind}


def frames(header: Header, text: str, data: Tensor) -> Iterator[tuple[bytes, memoryview | None]]:
    """The messages that carry `data`, contiguous and 1-D: (first frame, second frame, or None when all is in one)."""
    array: Any = data.detach().cpu().view(torch.uint8).numpy()
    raw = memoryview(array)
    if header.nbytes <= INLINE_NBYTES:
        yield header.pack(text) + raw.tobytes(), None
        return
    for number, first in enumerate(range(0, header.nbytes, CHUNK_NBYTES)):
        yield header._replace(chunk=number).pack("" if number else text), raw[first : first + CHUNK_NBYTES]


def chunk_nbytes(header: Header) -> int:
    """How many bytes this chunk must hold; 0 when it lies beyond the slice."""
    first = header.chunk * CHUNK_NBYTES
    return max(0, min(CHUNK_NBYTES, header.nbytes - first))


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


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype on the wire; BadInput for one that cannot be sent."""
    try:
        return _DTYPES.index(dtype)
    except ValueError:
        raise BadInput(f"tensors of {dtype} cannot be sent; use one of {', '.join(map(str, _DTYPES))}") from None


def dtype_of(code: int) -> torch.dtype:
    """The dtype of a number from the wire; PayloadError for an unknown one."""
    if code >= len(_DTYPES):
        raise PayloadError(f"unknown dtype number {code}")
    return _DTYPES[code]


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
