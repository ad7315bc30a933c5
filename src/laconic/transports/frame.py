"""The one message frame: its header, its kinds, how it is packed into ZeroMQ frames, and every check of what comes.

Callers: the ZeroMQ engine moves frames. `consistency/servers/messages.py`, `consistency/elastic/messages.py` and gossip
give the header's numbers names of their own. Nothing here opens a socket, and nothing is pickled.

A message is one ZeroMQ frame, header | text | payload, or two, header | text and payload; a long payload comes as
several messages, its chunks, in order. A header has 64 bytes, little-endian:

    magic 4 | version 1 | kind 1 | dtype 1 | flag 1 | text_nbytes 4 | chunk 4 | nbytes 8
    code 4 | subject 4 | sequence 8 | step 8 | detail 8 | value 8

Invariant: what `unpack` returns is of a known kind, and its lengths fit together; anything else is a PayloadError.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from laconic.errors import BadInput, PayloadError

# Every chunk that comes shows that a long slice gets on: 1 MiB takes 0.8 s at 10 Mbit/s. Longer frames would also let
# strangers fill more memory. On loopback 0.5–4 MiB are equally fast.
CHUNK_NBYTES = 1 << 20
# A second frame costs more than copying this much.
INLINE_NBYTES = 4096
# Options of an optimiser with a group for every parameter of a large model are 100 kB.
MAX_TEXT_NBYTES = CHUNK_NBYTES // 2
# ROUTER drops connections that announce a longer frame; CURVE adds some bytes to each.
MAX_FRAME_NBYTES = CHUNK_NBYTES + 1024

_HEADER = struct.Struct("<4sBBBBIIQIIQqQd")
HEADER_NBYTES = _HEADER.size
_MAGIC = b"Laco"
_VERSION = 1
_MAX_NBYTES = 1 << 48
_DTYPES = (
    torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64,
    torch.float16, torch.bfloat16, torch.float32, torch.float64,
    torch.bool, torch.complex64, torch.complex128,
)  # fmt: skip
NOTHING = torch.empty(0, dtype=torch.uint8)


class MessageKind(IntEnum):
    """The kind of a message. A family of kinds is a subclass with `@family` and numbers that no other family has."""


_KINDS: dict[int, MessageKind] = {}
Family = TypeVar("Family", bound=type[MessageKind])


def family(kinds: Family) -> Family:
    """Make a family of kinds known to `unpack`."""
    for kind in kinds:
        if kind in _KINDS:
            raise ValueError(f"{kind!r} has the number of {_KINDS[kind]!r}")
        _KINDS[int(kind)] = kind
    return kinds


@family
class EngineKind(MessageKind):
    """The engine's own messages, and tensors that are sent by themselves."""

    HELLO = 1  # text: the sender's address
    DATA = 2  # a slice of a collective's round, `step`; text, in the first of a call to a peer: the call's signature
    FAULT = 3  # the sender fails; code: one of FAULTS, subject: the culprit's number in the job, text: the reason
    BYE = 4  # the sender leaves
    PARCEL = 5  # a tensor outside collectives; code: its tag
    THANKS = 6  # the receiver's goodbye, and so all before it, has been taken in


class Header(NamedTuple):
    """The fixed part of a message.

    `nbytes` and `dtype` are the whole payload's, `chunk` says which piece of it follows. What the other numbers mean is
    its family's to say.
    """

    kind: MessageKind
    sequence: int = 0
    code: int = 0
    step: int = 0
    detail: int = 0
    subject: int = 0
    flag: int = 0
    value: float = 0.0
    dtype: int = 0
    chunk: int = 0
    nbytes: int = 0

    def pack(self, text: str = "") -> bytes:
        """Header and text as bytes.

        >>> unpack(Header(EngineKind.DATA, sequence=7).pack("ring")).header.sequence
        7
        """
        tail = text.encode()
        if len(tail) > MAX_TEXT_NBYTES:
            raise BadInput(f"a message's text has at most {MAX_TEXT_NBYTES} bytes, not {len(tail)}: '{text[:80]}…'")
        head = _HEADER.pack(
            _MAGIC, _VERSION, self.kind, self.dtype, self.flag, len(tail), self.chunk, self.nbytes,
            self.code, self.subject, self.sequence, self.step, self.detail, self.value,
        )  # fmt: skip
        return head + tail

    @property
    def chunk_nbytes(self) -> int:
        """How many bytes this chunk must hold; 0 when it lies beyond the payload."""
        return max(0, min(CHUNK_NBYTES, self.nbytes - self.chunk * CHUNK_NBYTES))


class Arrival(NamedTuple):
    """A message, or one chunk of it, that was received but not yet consumed."""

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
    magic, version, kind, dtype, flag, text_nbytes, chunk, nbytes, *rest = _HEADER.unpack_from(frame)
    code, subject, sequence, step, detail, value = rest
    if magic != _MAGIC or version != _VERSION:
        raise PayloadError(f"not a version {_VERSION} header")
    if kind not in _KINDS or dtype >= len(_DTYPES) or text_nbytes > MAX_TEXT_NBYTES or nbytes > _MAX_NBYTES:
        raise PayloadError("a header with an unknown kind or dtype, or an impossible length")
    end = HEADER_NBYTES + text_nbytes
    if len(frame) < end:
        raise PayloadError(f"a text of {text_nbytes} bytes was announced, {len(frame) - HEADER_NBYTES} came")
    try:
        text = frame[HEADER_NBYTES:end].decode()
    except UnicodeDecodeError as error:
        raise PayloadError(f"a message with a broken text: {error}") from None
    header = Header(_KINDS[kind], sequence, code, step, detail, subject, flag, value, dtype, chunk, nbytes)
    return Arrival(header, text, memoryview(bytearray(frame[end:])))  # writable, as torch wants it


class Frame(NamedTuple):
    """A whole message; the payload is 1-D and contiguous, and must stay as it is until it is sent."""

    header: Header
    text: str = ""
    payload: Tensor = NOTHING

    @property
    def kind(self) -> MessageKind:
        """What it is for."""
        return self.header.kind

    def parts(self) -> Iterator[tuple[bytes, memoryview | None]]:
        """What ZeroMQ carries: (first frame, second frame, or None when all is in one) of every chunk."""
        array: Any = self.payload.detach().cpu().view(torch.uint8).numpy()
        raw = memoryview(array)
        header = self.header._replace(nbytes=raw.nbytes)
        if raw.nbytes <= INLINE_NBYTES:
            yield header.pack(self.text) + raw.tobytes(), None
            return
        for number, first in enumerate(range(0, raw.nbytes, CHUNK_NBYTES)):
            text = "" if number else self.text
            yield header._replace(chunk=number).pack(text), raw[first : first + CHUNK_NBYTES]


class Growing:
    """The payload of one sender's message, while its chunks come."""

    def __init__(self) -> None:
        self._text, self._whole, self._grown = "", NOTHING, -1

    def add(self, arrival: Arrival) -> Frame | None:
        """Take a chunk; the message when that completes it.

        Raises:
            PayloadError: a chunk out of order, not a whole number of values, or of a payload that has no room here.
        """
        header, chunk = arrival.header, arrival.payload
        first, dtype = header.chunk * CHUNK_NBYTES, _DTYPES[header.dtype]
        if first == 0 and header.nbytes % dtype.itemsize == 0:
            self._grown = -1  # what was left of another is not needed any more
            try:
                self._whole = torch.empty(header.nbytes, dtype=torch.uint8)
            except RuntimeError as error:
                raise PayloadError(f"there is no room for a payload of {header.nbytes} bytes") from error
            self._text, self._grown = arrival.text, 0
        whole, grown, self._grown = self._whole, self._grown, -1
        if whole.numel() != header.nbytes or first != grown:
            self._whole = NOTHING
            raise PayloadError("a chunk that does not continue its message")
        if chunk.nbytes:
            whole[first : first + chunk.nbytes] = torch.frombuffer(chunk, dtype=torch.uint8)
        if first + chunk.nbytes < header.nbytes:
            self._grown = first + chunk.nbytes
            return None
        self._whole = NOTHING
        return Frame(header._replace(chunk=0), self._text, whole.view(dtype))


def dtype_code(dtype: torch.dtype) -> int:
    """The number of a dtype on the wire; BadInput for one that cannot be sent."""
    try:
        return _DTYPES.index(dtype)
    except ValueError:
        raise BadInput(f"tensors of {dtype} cannot be sent; use one of {', '.join(map(str, _DTYPES))}") from None
