"""What workers and servers say to each other: frames with a short JSON text and a codec's payload.

Callers: `server.py` and `client.py`; sites and peers, which have no server, use the same messages. Requests are
numbered by worker and shard, so that a request resent after a failure is recognised.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from laconic.codecs.plans import CodecPlan, PlannedCodec
from laconic.errors import PayloadError
from laconic.exchange.residuals import Residuals
from laconic.storage.json_text import parse
from laconic.transports.frame import NOTHING, Frame, Header, MessageKind, family
from laconic.transports.world import World


@family
class ServerKind(MessageKind):
    """What a message is for; requests come from workers, and each is answered once by a REPLY."""

    PUSH = 32  # apply the payload; the answer holds the weights if wanted
    PULL = 33  # the answer holds the weights
    FINISH = 34  # answered, with the weights, once every worker has sent it; to shard 0, with the model's buffers
    FORWARD = 35  # a server passes on a request to a copy; value: the staleness it counted
    STORED = 36  # a replica has it
    REPLY = 37  # clock: the slowest worker's; value: the staleness
    REFUSED = 38  # this server does not serve that shard (yet): ask again; with wants_weights: nobody has it any more
    WAITING = 39  # a sign that FINISH has come and others have yet to finish; version: how far the shard is
    BARRIER = 40  # between sites: these values are coming; wait for them
    COPY = 41  # a server gives another a shard to hold a copy of: the payload is all there is to know about it
    COMMIT = 42  # between peers: all have the mean; to a server: this worker has all answers to its FINISH


@dataclass(frozen=True)
class ServerMessage:
    """One message about a shard; `worker` is the rank whose request it is, or belongs to.

    Attributes:
        sequence: the request's number.
        version: of the weights: updates applied to the shard.
        clock: steps the worker has taken, this one included.
        value: see ServerKind.
        original: for FORWARD, the kind of the request.
        text: JSON for people and machines: the codec's spec, options of the optimiser that changed.
        payload: what the codec made, or float32 weights as bytes; it must stay as it is until it is sent.
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
    payload: Tensor = NOTHING

    @property
    def key(self) -> tuple[int, int, int]:
        """The unique key of a request."""
        return self.shard, self.worker, self.sequence

    @property
    def frame(self) -> Frame:
        """The message as it travels."""
        flags = int(self.wants_weights) | int(self.original) << 1
        header = Header(
            self.kind, self.sequence, self.shard, self.clock, self.version, self.worker, flags, self.value
        )  # fmt: skip
        return Frame(header, self.text, self.payload)

    def forwarded(self, staleness: float) -> ServerMessage:
        """This request as its server passes it on."""
        return replace(self, kind=ServerKind.FORWARD, original=self.kind, value=staleness)


def unpack(frame: Frame) -> ServerMessage:
    """Read what `ServerMessage.frame` made, PayloadError for anything else; the payload is not copied.

    >>> unpack(ServerMessage(ServerKind.PUSH, 0, 1, payload=torch.ones(3, dtype=torch.uint8)).frame).payload
    tensor([1, 1, 1], dtype=torch.uint8)
    """
    header, kind = frame.header, frame.kind
    if not isinstance(kind, ServerKind) or frame.payload.dtype != torch.uint8:
        raise PayloadError(f"{kind!r} of {frame.payload.dtype} is no message between workers and servers")
    try:
        original = ServerKind(header.flag >> 1)
    except ValueError as error:
        raise PayloadError(f"a message of an unknown kind: {error}") from None
    return ServerMessage(
        kind, header.code, header.subject, header.sequence, header.detail, header.step, header.value,
        bool(header.flag & 1), original, frame.text, frame.payload,
    )  # fmt: skip


def settings(text: str) -> dict[str, Any]:
    """The text of a message as a dictionary; PayloadError if it is not one."""
    try:
        found = parse(text) if text else {}
    except PayloadError:
        raise PayloadError(f"a message's text is not JSON: '{text[:80]}'") from None
    if not isinstance(found, dict):
        raise PayloadError(f"a message's text is not a dictionary: '{text[:80]}'")
    return found


def weights_in(message: ServerMessage, numel: int, more: bool = False) -> Tensor:
    """The float32 weights in a REPLY; PayloadError unless they are `numel`, or with `more` at least that."""
    payload, came = message.payload, message.payload.numel()
    if came < 4 * numel or (came > 4 * numel and not more):
        raise PayloadError(f"shard {message.shard} has {4 * numel} bytes of weights, the answer holds {came}")
    return payload[: 4 * numel].view(torch.float32)


class Coder:
    """Encodes the same parts repeatedly, with error feedback: the residual of one message is in the next.

    Args:
        world: gives random codecs a different seed per rank.
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
