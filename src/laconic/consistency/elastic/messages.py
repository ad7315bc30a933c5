"""What members of an elastic group say to each other.

Callers: `line.py` unpacks; senders pack. Every message belongs to a view.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple, TypeVar

from torch import Tensor

from laconic.errors import PayloadError
from laconic.storage import json_text
from laconic.storage.typed_json import from_plain
from laconic.transports.frame import NOTHING, Frame, Header, MessageKind, family
from laconic.workloads.order import Parts

T = TypeVar("T")
Paces = tuple[tuple[int, int], ...]  # members, and nanoseconds that a sample takes there

MAX_MEMBERS = 64  # bits of a message's `detail`
NO_MODEL = -1  # the step of a worker that has no state yet


@family
class MemberKind(MessageKind):
    """What a message is for; M: said by a member to the coordinator, C: by the coordinator to members."""

    JOIN = 64  # by a newcomer to the coordinator; text: its address; step: those it has caught up with, or −1
    VIEW = 65  # C: a new view, as at the meeting place, is the text
    REPORT = 66  # M: in this view; step: how many steps are applied here, −1 without a model; flag: was told to train
    START = 67  # C: the view begins at `step`; flag: train, else wait; detail: a bit for each that gets a STATE or
    # REPEATs; text: into how many shares the step under way is divided, if not by this view
    FETCH = 68  # C: send me your state
    STATE = 69  # body: a replica after `step` steps
    GRADIENT = 70  # M: where vectors are collected: body: the mean gradient over `detail` samples, or whatever it is;
    # text: nanoseconds a sample here
    MEAN = 71  # C: body: the mean of all; detail: one bit for each member whose gradient is in it
    HELD = 72  # M: the weights after `step` steps are here too; to all when they came as a STATE
    BUSY = 73  # to all, in any view: flag: no step from me for a while (else: again)
    FINISH = 74  # M: no more steps from me
    DONE = 75  # C: nobody has any more steps
    LEAVE = 76  # to all: I am leaving
    WAITING = 77  # M, or C to all: for others, in a step; detail: a bit for each member that is out of reach from here
    READY = 78  # M: the sum of `step` is here, and not applied yet; detail: nanoseconds a sample here, 0: unknown
    COMMIT = 79  # C: all have the sum of `step`: apply it; text, as of a MEAN: all members' nanoseconds a sample
    UNREADABLE = 80  # M: what the member at the place `detail` sent cannot be read; text: why
    PIECE = 81  # from member to member: a piece of an exchange; detail: which
    WANT = 82  # by a newcomer to the coordinator: the state; step: how far it is
    KEEP = 83  # C: keep the state after `step` for a newcomer
    OFFERED = 84  # C to a newcomer: step: made so far; flag: begun; text: what there is; body: checksums of its chunks
    PULL = 85  # by a newcomer to a member: a chunk of the state after `step`, flag: of the mean of `step`
    CHUNK = 86  # by a member: what a PULL asked for, or nothing
    REPEAT = 87  # C: body: the mean of `step`, for a member that is a few steps behind; text: how it is applied


@dataclass(frozen=True)
class AgreementNote:
    """What a REPEAT says of the agreement that it repeats.

    Attributes:
        parts: how the samples were divided.
        included: the places, in the view, of those who contributed.
        ids: their numbers.
        paces: all members' speed.
        alone: it was made by the only member of a view.
    """

    parts: Parts
    included: tuple[int, ...]
    ids: tuple[int, ...]
    paces: Paces
    alone: bool = False


@dataclass(frozen=True)
class StateOffer:
    """What an OFFERED says: the digest of the weights after `at` steps, and each blob's step, size and note."""

    at: int
    digest: int | None
    blobs: tuple[tuple[int, int, AgreementNote | None], ...]


class MemberMessage(NamedTuple):
    """A message that has come."""

    sender: int
    kind: MemberKind
    view: int
    step: int
    detail: int
    flag: int
    body: Tensor
    text: str = ""

    def read(self, kind: type[T], default: Any = None) -> T:
        """Its text, JSON, as a `kind`; of no text, `default`.

        Raises:
            PayloadError: it says something else.
        """
        about = f"{self.kind.name} from worker {self.sender}"
        return from_plain(kind, json_text.parse(self.text) if self.text else default, about)


def pack(
    kind: MemberKind, view: int, step: int, detail: int = 0, flag: int = 0, *, body: Tensor = NOTHING, text: str = ""
) -> Frame:
    """A message as it travels; the body must stay as it is until it is sent.

    >>> unpack(3, pack(MemberKind.VIEW, 7, 2, text="abc")).text
    'abc'
    """
    return Frame(Header(kind, sequence=view, step=step, detail=detail, flag=flag), text, body)


def unpack(sender: int, frame: Frame) -> MemberMessage:
    """Read what `pack` made, PayloadError for anything else; the body is not copied."""
    header, kind = frame.header, frame.kind
    if not isinstance(kind, MemberKind):
        raise PayloadError(f"{kind!r} is no message of a group")
    return MemberMessage(
        sender, kind, header.sequence, header.step, header.detail, header.flag, frame.payload, frame.text
    )
