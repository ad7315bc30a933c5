"""How the vectors that members agree on travel, and the messages of a group.

Callers: `group.py` sends and receives, `job.py` writes the vector and says what was committed. Members sum their
vectors among themselves (`exchanged.py`). Where it is not known before who is in the sum, or a rule wants every single
vector, the coordinator collects them: `Exact` as float32, `coded.py` through a codec. Invariant: what all members end
with has the same bits.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from laconic.errors import PayloadError

_HEADER = struct.Struct("<4sBBHIqQ4x")  # magic, kind, flag, version, view, step, detail, to a multiple of 16
HEADER_NBYTES = _HEADER.size
_MAGIC = b"LacE"
_VERSION = 2
MAX_MEMBERS = 64  # bits of a message's `detail`


class MemberKind(IntEnum):
    """What a message is for; M: said by a member to the coordinator, C: by the coordinator to members."""

    JOIN = 1  # by a newcomer to the coordinator; body: its address
    VIEW = 2  # C: a new view, the body, as in the meeting folder
    REPORT = 3  # M: in this view; step: how many steps are applied here, −1 without a model; flag: was told to train
    START = 4  # C: the view begins at `step`; flag: train (else wait for more); detail: a bit for each who gets a STATE
    FETCH = 5  # C: send me your state
    STATE = 6  # body: a replica after `step` steps
    GRADIENT = 7  # M: where vectors are collected: body: the mean gradient over `detail` samples, or whatever it is
    MEAN = 8  # C: body: the mean of all; detail: one bit for each member whose gradient is in it
    HELD = 9  # M: the weights after `step` steps are here too; to all when they came as a STATE
    BUSY = 10  # to all, in any view: flag: no step from me for a while (else: again)
    FINISH = 11  # M: no more steps from me
    DONE = 12  # C: nobody has any more steps
    LEAVE = 13  # to all: I am leaving
    WAITING = 14  # M, or C to all: for others, in a step; detail: a bit for each member that is out of reach from here
    READY = 15  # M: the sum of `step` is here, and not applied yet
    COMMIT = 16  # C: all have the sum of `step`: apply it
    UNREADABLE = 17  # M: what the member at the place `detail` sent cannot be read; body: why
    PIECE = 18  # from member to member: a piece of an exchange; no message of this format, see `piece_tag`


class MemberMessage(NamedTuple):
    """A message taken apart."""

    sender: int
    kind: MemberKind
    view: int
    step: int
    detail: int
    flag: int
    body: Tensor

    @property
    def text(self) -> str:
        """The body as text."""
        return bytes(self.body.numpy()).decode(errors="replace")


def pack(kind: MemberKind, view: int, step: int, detail: int = 0, flag: int = 0, body: bytes | Tensor = b"") -> Tensor:
    """A message as one uint8 tensor.

    >>> unpack(3, pack(MemberKind.VIEW, 7, 2, body=b"abc")).text
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


def address(message: Tensor, kind: MemberKind, view: int, step: int, detail: int = 0, flag: int = 0) -> Tensor:
    """Write the header of a message whose body is there."""
    head = _HEADER.pack(_MAGIC, kind, flag, _VERSION, view, step, detail)
    message[:HEADER_NBYTES] = torch.frombuffer(bytearray(head), dtype=torch.uint8)
    return message


def unpack(sender: int, message: Tensor) -> MemberMessage:
    """Take a message apart, PayloadError when it is not one of ours; the body is not copied."""
    if message.dtype != torch.uint8 or message.numel() < HEADER_NBYTES:
        raise PayloadError(f"a group's message has at least {HEADER_NBYTES} bytes")
    magic, kind, flag, version, view, step, detail = _HEADER.unpack(bytes(message[:HEADER_NBYTES].numpy()))
    if magic != _MAGIC or version != _VERSION or kind not in _KINDS:
        raise PayloadError("not a message of a group, or of another version")
    return MemberMessage(sender, _KINDS[kind], view, step, detail, flag, message[HEADER_NBYTES:])


_KINDS = {int(kind): kind for kind in MemberKind if kind is not MemberKind.PIECE}


def piece_tag(view: int, code: int) -> int:
    """The tag with which a piece of an exchange travels: that of messages is 0.

    >>> view_of(piece_tag(130, 77)) == view_of(piece_tag(2, 78)), view_of(0)
    (True, None)
    """
    return 1 << 31 | (view & 0x7F) << 24 | code & 0xFFFFFF


def view_of(tag: int) -> int | None:
    """The view of a piece, modulo 128; None for what is no piece."""
    return tag >> 24 & 0x7F if tag >> 31 else None


def piece(sender: int, tag: int, view: int, data: Tensor) -> MemberMessage:
    """A piece that came in `view`, as a message; its own view is another where the tag says so."""
    return MemberMessage(sender, MemberKind.PIECE, view if view_of(tag) == view & 0x7F else -1, 0, tag, 0, data)


Rule = Callable[[Sequence[tuple[int, Tensor]], Tensor], None]  # one vector of (samples, vector) of each


class Mean(NamedTuple):
    """What a step applies: the mean gradient, and the places of those in it; who has no samples is not."""

    values: Tensor
    included: tuple[int, ...]


def weighted_mean(parts: Sequence[tuple[int, Tensor]], out: Tensor) -> None:
    """out = Σ nᵢ·gᵢ / Σ nᵢ over (nᵢ, gᵢ) in the order given; of one alone, its own bits.

    >>> out = torch.empty(2)
    >>> weighted_mean([(1, torch.tensor([0.0, 4.0])), (3, torch.tensor([4.0, 0.0])), (0, torch.ones(2))], out)
    >>> out
    tensor([3., 1.])
    """
    total = sum(count for count, _ in parts)
    counted = [(count / total, values) for count, values in parts if count]
    weight, values = counted[0]
    torch.mul(values, weight, out=out)
    for weight, values in counted[1:]:
        out.add_(values, alpha=weight)


class Offer(NamedTuple):
    """What a member offered: over how many samples, and the body of its message, which is None for one's own."""

    member: int
    samples: int
    body: Tensor | None


class Unreadable(PayloadError):
    """What this member sent cannot be read."""

    def __init__(self, member: int, why: object) -> None:
        super().__init__(f"what worker {member} sent cannot be read: {why}")
        self.member = member


class Occasion(NamedTuple):
    """Which agreement this is: the step, this worker's place in the view, and how many samples all have together."""

    step: int
    place: int
    samples: int


class Wire(Protocol):
    """One worker's end: `Collected`, or `Exchanged`."""

    values: Tensor  # where the vector that is offered next is written

    def renew(self) -> None:
        """What was offered last may still be on its way: do not write to it again."""
        return

    def committed(self, included: bool) -> None:
        """The agreement was applied here, with this worker's offer in it or not."""
        return

    def resume(self, step: int, included: bool) -> None:
        """A state after `step` steps came from a peer; `included`: this worker's offer is in the last of them."""
        return

    def forget(self) -> None:
        """This worker begins as a newcomer."""
        return

    def state_dict(self) -> dict[str, Tensor]:
        """What this worker is still to send, between two steps; nothing where nothing is left out."""
        return {}

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on with what another left, before the first step."""
        return


class Collected(Wire, Protocol):
    """Vectors that the coordinator collects: a star, in which it sends and receives those of all."""

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        """The message, its header blank, in which `values` goes to the coordinator."""

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor | None, Tensor]:
        """The message, its header blank, that tells `listeners` others the result, and the result; or Unreadable."""

    def read(self, body: Tensor) -> Tensor:
        """The result from its message; PayloadError when it cannot be read."""


class Exact(Collected):
    """Vectors of float32, without a copy on the way out.

    Cost: 4 bytes a value each way.

    Args:
        rule: what the coordinator makes of all vectors.
        believes: refuse vectors of a wrong size, else the rule gets NaN for them.
    """

    def __init__(self, numel: int, rule: Rule = weighted_mean, *, believes: bool = True) -> None:
        self._numel, self._rule, self._believes = numel, rule, believes
        self.renew()

    def renew(self) -> None:
        self._message = blank(4 * self._numel)
        self.values = values_of(self._message)

    def offer(self, samples: int, occasion: Occasion) -> Tensor:
        return self._message

    def combine(self, offers: Sequence[Offer], occasion: Occasion, listeners: int) -> tuple[Tensor | None, Tensor]:
        parts = [(offer.samples, self._vector(offer)) for offer in offers]
        message = blank(4 * self._numel)
        self._rule(parts, values_of(message))
        return message, values_of(message).clone()  # a copy: the message will be on its way

    def _vector(self, offer: Offer) -> Tensor:
        if offer.body is None:
            return self.values
        try:
            return self.read(offer.body)
        except PayloadError as error:
            if self._believes:
                raise Unreadable(offer.member, error) from None
            return torch.full((self._numel,), float("nan"))

    def read(self, body: Tensor) -> Tensor:
        if body.numel() != 4 * self._numel:
            raise PayloadError(f"{body.numel()} bytes for {self._numel} float32 values")
        return body.view(torch.float32)
