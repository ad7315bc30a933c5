"""What workers and servers say to each other: a header of 48 bytes, a short JSON text, and a codec's payload.

Callers: `server.py` and `client.py`. Nothing is pickled. Every request has a number of its own, by worker and
shard, so that a request sent again after a failure is recognised; numbers are little-endian.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, replace
from enum import IntEnum
from typing import Any

import torch
from torch import Tensor

from laconic.errors import PayloadError
from laconic.exchange.options import CodecPlan, PlannedCodec
from laconic.exchange.residuals import Residuals
from laconic.storage.json_text import parse
from laconic.transports.world import World

_HEADER = struct.Struct("<4sBBHIIQQqd")
HEADER_NBYTES = _HEADER.size
_MAGIC = b"LacS"
_ALIGNMENT = 64  # of the payload, from the beginning of the message
MAX_TEXT_NBYTES = 1 << 24  # options of an optimiser with a group for every parameter of a large model are 100 kB


class ServerKind(IntEnum):
    """What a message is for; requests come from workers, and each is answered once by a REPLY."""

    PUSH = 1  # apply the payload; the answer holds the weights if wanted
    PULL = 2  # the answer holds the weights
    FINISH = 3  # answered, with the weights, once every worker has sent it; to shard 0, with the model's buffers
    FORWARD = 4  # a server passes on a request to a copy; value: the staleness it counted
    STORED = 5  # a replica has it
    REPLY = 6  # clock: the slowest worker's; value: the staleness
    REFUSED = 7  # this server does not serve that shard (yet): ask again; with wants_weights: nobody has it any more
    WAITING = 8  # a sign that FINISH has come and others have yet to finish; version: how far the shard is
    BARRIER = 9  # between sites: these values are coming; wait for them
    COPY = 10  # a server gives another a shard to hold a copy of: the payload is all there is to know about it
    COMMIT = 11  # between peers: all have the mean; to a server: this worker has all answers to its FINISH


@dataclass(frozen=True)
class ServerMessage:
    """One message about a shard; `worker` is the rank whose request it is, or belongs to.

    Attributes:
        sequence: the request's number.
        version: of the weights: updates applied to the shard.
        clock: steps the worker has taken, this one included.
        value: see Kind.
        original: for FORWARD, the kind of the request.
        text: JSON for people and machines: the codec's spec, options of the optimiser that changed.
        payload: what the codec made, or float32 weights as bytes.
    """

    kind: ServerKind
    shard: int
    worker: int
    sequence: int = 0
    version: int = 0
    clock: int = 0
    value: float = 0.0
    wants_weights: bool = False
    original: ServerKind = ServerKind.PUSH
    text: str = ""
    payload: Tensor | None = None

    @property
    def key(self) -> tuple[int, int, int]:
        """What tells a request from all others."""
        return self.shard, self.worker, self.sequence

    def pack(self) -> Tensor:
        """The message as one uint8 tensor of its own.

        >>> ServerMessage(ServerKind.PULL, shard=2, worker=1, sequence=7).pack().numel()
        64
        """
        text = self.text.encode()
        flags = int(self.wants_weights) | int(self.original) << 1
        head = _HEADER.pack(
            _MAGIC, self.kind, flags, self.shard, self.worker, len(text), self.sequence, self.version, self.clock,
            self.value,
        )  # fmt: skip
        begin = _aligned(HEADER_NBYTES + len(text))
        size = 0 if self.payload is None else self.payload.numel()
        packed = torch.empty(begin + size, dtype=torch.uint8)
        packed[:begin] = torch.frombuffer(bytearray((head + text).ljust(begin, b"\0")), dtype=torch.uint8)
        if self.payload is not None:
            packed[begin:] = self.payload
        return packed

    def forwarded(self, staleness: float) -> ServerMessage:
        """This request as its server passes it on."""
        return replace(self, kind=ServerKind.FORWARD, original=self.kind, value=staleness)


def unpack(data: Tensor) -> ServerMessage:
    """Read what `ServerMessage.pack` made, PayloadError for anything else; the payload is a view of `data`.

    >>> unpack(ServerMessage(ServerKind.PUSH, 0, 1, payload=torch.ones(3, dtype=torch.uint8)).pack()).payload
    tensor([1, 1, 1], dtype=torch.uint8)
    """
    if data.dtype != torch.uint8 or data.numel() < HEADER_NBYTES:
        raise PayloadError(f"a message begins with {HEADER_NBYTES} bytes, got {data.numel()} of {data.dtype}")
    head = bytes(data[:HEADER_NBYTES].numpy())
    magic, kind, flags, shard, worker, text_nbytes, sequence, version, clock, value = _HEADER.unpack(head)
    begin = _aligned(HEADER_NBYTES + text_nbytes)
    if magic != _MAGIC or text_nbytes > MAX_TEXT_NBYTES or begin > data.numel():
        raise PayloadError("not a message between workers and servers, or one cut short")
    try:
        kinds = ServerKind(kind), ServerKind(flags >> 1)
        text = bytes(data[HEADER_NBYTES : HEADER_NBYTES + text_nbytes].numpy()).decode()
    except ValueError as error:
        raise PayloadError(f"a message of an unknown kind or with a broken text: {error}") from None
    return ServerMessage(
        kinds[0], shard, worker, sequence, version, clock, value, bool(flags & 1), kinds[1], text, data[begin:]
    )


def settings(text: str) -> dict[str, Any]:
    """The text of a message as a dictionary; PayloadError when it is none."""
    try:
        found = parse(text) if text else {}
    except PayloadError:
        raise PayloadError(f"a message's text is not JSON: '{text[:80]}'") from None
    if not isinstance(found, dict):
        raise PayloadError(f"a message's text is not a dictionary: '{text[:80]}'")
    return found


def raw(values: Tensor) -> Tensor:
    """Float32 values as bytes, without copying."""
    return values.view(torch.uint8)


def weights_in(message: ServerMessage, numel: int, more: bool = False) -> Tensor:
    """The float32 weights a REPLY holds; PayloadError when they are not `numel`, or with `more` not even that."""
    payload = message.payload
    came = 0 if payload is None else payload.numel()
    if payload is None or came < 4 * numel or (came > 4 * numel and not more):
        raise PayloadError(f"shard {message.shard} has {4 * numel} bytes of weights, the answer holds {came}")
    return payload[: 4 * numel].view(torch.float32)


def _aligned(nbytes: int) -> int:
    return -(-nbytes // _ALIGNMENT) * _ALIGNMENT


class Coder:
    """Encodes the same parts again and again; what a codec leaves out of one message is in the next.

    Args:
        world: so that random codecs draw apart.
        feedback: False: what a codec leaves out is not kept for the next message.
    """

    def __init__(self, plan: CodecPlan, world: World, feedback: bool | None = None) -> None:
        self.plan = PlannedCodec(plan)
        self.residuals = Residuals(feedback)
        self._world = world

    def encode(self, part: int, x: Tensor, step: int) -> tuple[str, Tensor]:
        """The codec's spec and the payload of `x`, which is left alone."""
        codec = self.plan.at(step)
        room = torch.empty(codec.max_nbytes(x.numel()), dtype=torch.uint8)
        draw = step * self._world.world_size + self._world.rank
        return str(codec), self.residuals.encode(str(part), codec, x, step=draw, out=room)
