"""What the members of a group say to each other: a fixed header before a body of bytes, and no pickle.

Callers: `group.py`, over `ZmqTransport.send_to`. Every message carries the number of the view it belongs to, so that
what a zombie of an older view says can be told from what counts. All numbers are little-endian.
"""

from __future__ import annotations

import struct
from enum import IntEnum
from typing import NamedTuple

import torch
from torch import Tensor

from laconic.errors import PayloadError

_HEADER = struct.Struct("<4sBBHIqQ4x")  # magic, kind, flag, version, view, step, detail, to a multiple of 16
HEADER_NBYTES = _HEADER.size
_MAGIC = b"LacE"
_VERSION = 1
MAX_MEMBERS = 64  # bits of a message's `detail`


class Kind(IntEnum):
    """What a message is for; M: said by a member to the coordinator, C: by the coordinator to members."""

    JOIN = 1  # by a newcomer to the coordinator; body: its address
    VIEW = 2  # C: a new view, the body, as in the meeting folder
    REPORT = 3  # M: in this view; step: how many steps are applied here, −1 without a model; flag: was told to train
    START = 4  # C: the view begins at `step`; flag: train (else wait for more); detail: a bit for each who gets a STATE
    FETCH = 5  # C: send me your state
    STATE = 6  # body: a replica after `step` steps
    GRADIENT = 7  # M: body: the mean gradient over `detail` samples, or whatever members agree on (`wire.py`)
    MEAN = 8  # C: body: the mean of all; detail: one bit for each member whose gradient is in it
    HELD = 9  # M: the weights after `step` steps are here too; to all when they came as a STATE
    BUSY = 10  # to all, in any view: flag: no step from me for a while (else: again)
    FINISH = 11  # M: no more steps from me
    DONE = 12  # C: nobody has any more steps
    LEAVE = 13  # to all: I am leaving


class Message(NamedTuple):
    """A message taken apart."""

    sender: int
    kind: Kind
    view: int
    step: int
    detail: int
    flag: int
    body: Tensor

    @property
    def text(self) -> str:
        """The body as text."""
        return bytes(self.body.numpy()).decode(errors="replace")


def pack(kind: Kind, view: int, step: int, detail: int = 0, flag: int = 0, body: bytes | Tensor = b"") -> Tensor:
    """A message as one uint8 tensor.

    >>> unpack(3, pack(Kind.VIEW, 7, 2, body=b"abc")).text
    'abc'
    """
    if not isinstance(body, Tensor):
        body = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else torch.empty(0, dtype=torch.uint8)
    whole = blank(body.nbytes)
    whole[HEADER_NBYTES:] = body.view(torch.uint8)
    return address(whole, kind, view, step, detail, flag)


def blank(nbytes: int) -> Tensor:
    """Memory for a message with a body of `nbytes`, to be filled before `address` completes it."""
    return torch.empty(HEADER_NBYTES + nbytes, dtype=torch.uint8)


def values_of(message: Tensor) -> Tensor:
    """The body of a message as float32 values, without a copy."""
    return message[HEADER_NBYTES:].view(torch.float32)


def address(message: Tensor, kind: Kind, view: int, step: int, detail: int = 0, flag: int = 0) -> Tensor:
    """Write the header of a message whose body is there."""
    head = _HEADER.pack(_MAGIC, kind, flag, _VERSION, view, step, detail)
    message[:HEADER_NBYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return message


def unpack(sender: int, message: Tensor) -> Message:
    """Take a message apart; the body is not copied.

    Raises:
        PayloadError: not one of ours.
    """
    if message.dtype != torch.uint8 or message.numel() < HEADER_NBYTES:
        raise PayloadError(f"a group's message has at least {HEADER_NBYTES} bytes")
    magic, kind, flag, version, view, step, detail = _HEADER.unpack(bytes(message[:HEADER_NBYTES].numpy()))
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS:
        raise PayloadError("not a message of a group, or of another version")
    return Message(sender, _KINDS[kind], view, step, detail, flag, message[HEADER_NBYTES:])


_KINDS = {int(kind): kind for kind in Kind}
