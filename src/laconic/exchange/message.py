"""Channels, and the message they share: a row of uint32 lengths, one a piece, then the pieces' payloads.

Callers: every exchange through codecs. Payloads begin at multiples of 16 bytes and are encoded where they lie in the
message, in memory that exchanges borrow from a pool for a round. The length POISON stands for a piece that held NaN or
infinity and has no payload.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.residuals import Site

POISON = 0xFFFFFFFF
ALIGN = 16


def aligned(nbytes: int) -> int:
    """`nbytes` rounded up, so that what follows is aligned."""
    return -(-nbytes // ALIGN) * ALIGN


def head_nbytes(pieces: int) -> int:
    """The room the lengths of `pieces` pieces take."""
    return aligned(4 * pieces)


def max_nbytes(sizes: Sequence[int]) -> int:
    """The most a message takes whose payloads take at most these bytes."""
    return head_nbytes(len(sizes)) + sum(map(aligned, sizes))


class MessagePool:
    """Memory for messages, lent for as long as they are on their way: as much as ever was in use at once.

    >>> pool = MessagePool()
    >>> first = pool.lend(100)
    >>> pool.take_back([first])
    >>> pool.lend(80) is first, pool.lend(80) is first
    (True, False)
    """

    def __init__(self) -> None:
        self._free: list[Tensor] = []

    def lend(self, nbytes: int) -> Tensor:
        """The smallest free block of `nbytes` to twice as many, or a new one of zeros: gaps in messages are sent."""
        sizes = [(block.numel(), place) for place, block in enumerate(self._free)]
        fitting = [each for each in sizes if nbytes <= each[0] <= 2 * nbytes]
        return self._free.pop(min(fitting)[1]) if fitting else torch.zeros(nbytes, dtype=torch.uint8)

    def take_back(self, blocks: Sequence[Tensor]) -> None:
        """Nobody reads or writes these blocks any more."""
        self._free += blocks


class Writer:
    """One message of payloads of at most these sizes, filled piece by piece, again and again.

    >>> writer = Writer([4, 4])
    >>> writer.begin(torch.zeros(writer.nbytes, dtype=torch.uint8))
    >>> _ = writer.room().fill_(7)
    >>> writer.add(writer.room()[:3]), writer.add(None)
    (None, None)
    >>> unpack(writer.finish(), 2)
    ([tensor([7, 7, 7], dtype=torch.uint8), None], 32)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.nbytes = max_nbytes(sizes)
        self._count = len(sizes)
        self._memory = torch.empty(0)
        self._at = 0
        self._lengths: list[int] = []

    def begin(self, memory: Tensor) -> None:
        """Write into `memory`, of at least `nbytes`, from now on."""
        self._memory = memory
        self._at = head_nbytes(self._count)
        self._lengths = []

    def room(self) -> Tensor:
        """Where the next payload goes: encode into it."""
        return self._memory[self._at :]

    def add(self, payload: Tensor | None) -> None:
        """The next piece: what was encoded into `room()`, a payload from elsewhere (copied), or None for poison."""
        if payload is None:
            self._lengths.append(POISON)
            return
        length = payload.numel()
        if payload.data_ptr() != self._memory.data_ptr() + self._at:
            self._memory[self._at : self._at + length] = payload
        self._lengths.append(length)
        self._at += aligned(length)

    def finish(self) -> Tensor:
        """The whole message, a view of the memory."""
        struct.pack_into(f"<{self._count}I", self._memory.numpy().data, 0, *self._lengths)
        return self._memory[: self._at]


def pack(payloads: Sequence[Tensor | None]) -> Tensor:
    """A message of these payloads in memory of its own."""
    writer = Writer([0 if payload is None else payload.numel() for payload in payloads])
    writer.begin(torch.zeros(writer.nbytes, dtype=torch.uint8))
    for payload in payloads:
        writer.add(payload)
    return writer.finish()


def unpack(data: Tensor, count: int) -> tuple[list[Tensor | None], int]:
    """The payloads in a message (None: poisoned), and the bytes it took."""
    at, size = head_nbytes(count), data.numel()
    if size < at:
        raise PayloadError(f"a message of {size} bytes has no room for {count} lengths")
    found: list[Tensor | None] = []
    for length in struct.unpack_from(f"<{count}I", data.numpy().data):
        if length == POISON:
            found.append(None)
            continue
        if at + length > size:
            raise PayloadError(f"a piece of {length} bytes does not fit a message of {size}")
        found.append(data[at : at + length])
        at += aligned(length)
    return found, at


class Feeds(Protocol):
    """A `Residual`, or what wraps one."""

    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor: ...

    def carry(self, x: Tensor) -> Tensor: ...


@dataclass
class Channel:
    """A float32 buffer, its codec, and its residual; None feeds nothing back."""

    buffer: Tensor
    codec: Codec
    residual: Feeds | None = None

    def carry(self) -> None:
        """Add to the buffer what a former schedule, world or codec left to be sent."""
        if self.residual is not None:
            self.residual.carry(self.buffer)

    def encode(self, values: Tensor, site: Site, draws: int, room: Tensor, copies: int = 1) -> Tensor | None:
        """The payload of `values`, a part of the buffer, in `room`; None (poison) where they hold NaN or infinity.

        The residual of `site` is added, and keeps what the codec leaves out; `copies` ranks encode the same values.
        """
        try:
            if self.residual is None:
                return self.codec.encode(values, step=draws, out=room)
            return self.residual.encode(self.codec, values, site, step=draws, out=room, copies=copies)
        except NonFiniteError:
            return None


def decode(coder: Codec, payload: Tensor | None, values: Tensor, *, add: bool, divisor: int = 1) -> None:
    """Add a payload to `values`, or put it, divided, in their place; poison makes them NaN."""
    if payload is None:
        values.fill_(float("nan"))
    elif add:
        coder.decode_add(payload, values)
    elif divisor != 1:
        coder.decode_mean([payload], divisor, values)
    else:
        coder.decode(payload, values.numel(), out=values)


def detail(channels: Sequence[Channel]) -> str:
    """What ranks compare of the channels they exchange."""
    return " and ".join(f"{channel.buffer.numel()} through {channel.codec}" for channel in channels)
