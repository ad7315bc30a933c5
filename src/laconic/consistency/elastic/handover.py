"""Hand the state to newcomers in chunks, while the members train on.

Callers: `membership.py` (a newcomer's `Loader`) and `group.py` (a member's `Handover`). A newcomer that is not in the
view yet asks for the state. After the next agreement every member keeps a snapshot of it, and from then on the mean of
each agreement. The newcomer pulls chunks from all members, repeats the agreements made since, and asks to join when it
has caught up: then the members have nothing to wait for.

Members answer between steps only, and a newcomer has at most a window of chunks under way at each, so that an exchange
does not compete with it. A window grows while its answers leave the link idle for longer than they take. When the means
since a snapshot weigh more than the snapshot, a new one is kept instead.

Invariant: a chunk is used only if its checksum is the one that the coordinator gave. Buffers and an optimiser's state
may differ between members; such chunks come from the coordinator alone.
"""

from __future__ import annotations

import json
import time
import zlib
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from laconic.consistency.elastic.line import Line
from laconic.consistency.elastic.meeting import View
from laconic.consistency.elastic.messages import NO_MODEL, AgreementNote, MemberKind, MemberMessage, StateOffer, pack
from laconic.consistency.elastic.replica import Replica
from laconic.errors import PayloadError
from laconic.storage.typed_json import to_plain
from laconic.transports.frame import NOTHING, Frame
from laconic.transports.zeromq_stripes import QUEUE

CHUNK_NBYTES = 1 << 18
SMALL_NBYTES = 1 << 20  # a state of at most this size is sent at once, when its newcomer is in the view
LAG = 2  # a newcomer that is no more behind is sent each mean as it is made
WINDOW = 4  # chunks under way from one member to one newcomer, to begin with
MOST_WINDOW = 64
ASK_S = 0.2  # how often a newcomer asks how far the members are
ANSWER_S = 5.0  # after which a chunk is asked of another member
LOGGED_NBYTES = 1 << 24  # of means are kept beside a snapshot in any case
IDLE_S = 30.0  # a snapshot that nobody asks for is dropped
_LOW = (1 << 32) - 1
MOST_STATES = 3  # a newcomer that does not catch up joins as it is, and the members wait for it


def digest(replica: Replica) -> int:
    """A checksum of the weights that all have agreed on, between two agreements; never 0."""
    with replica.agreed() as values:
        return zlib.crc32(values.numpy().data) + 1


def _noted(digests: dict[int, int], step: int, replica: Replica) -> dict[int, int]:
    """The digests of the last steps, this one included."""
    return {each: found for each, found in digests.items() if each > step - 2 * LAG} | {step: digest(replica)}


class Blob:
    """Bytes that are handed out in chunks: the state after `step` agreements, or the mean of agreement `step`."""

    def __init__(self, step: int, content: Tensor, about: AgreementNote | None = None) -> None:
        self.step, self.content, self.about = step, content.view(torch.uint8), about
        parts = range(0, self.content.numel(), CHUNK_NBYTES)
        self.checksums = [zlib.crc32(self.content[at : at + CHUNK_NBYTES].numpy().data) for at in parts]

    def chunk(self, number: int, checksum: int) -> Tensor:
        """A chunk; nothing where there is none with this checksum."""
        if not 0 <= number < len(self.checksums) or self.checksums[number] != checksum:
            return NOTHING
        return self.content[number * CHUNK_NBYTES : (number + 1) * CHUNK_NBYTES]


class Handover:
    """A member's side: keeps what newcomers ask for, and hands it out."""

    def __init__(self, line: Line, replica: Replica) -> None:
        self._line, self._replica = line, replica
        self._state: Blob | None = None
        self._means: dict[int, Blob] = {}
        self._keeps_at = NO_MODEL
        self._asked_at = -IDLE_S
        self._digests: dict[int, int] = {}  # of the weights after the last steps
        self._followers: dict[int, float] = {}  # newcomers that have all but caught up

    @property
    def is_wanted(self) -> bool:
        """Whether a newcomer waits for a snapshot that the members do not have."""
        return time.monotonic() - self._asked_at < IDLE_S and self._state is None

    @property
    def held_nbytes(self) -> int:
        """Memory for newcomers."""
        blobs = [*self._means.values(), *([self._state] if self._state else [])]
        return sum(blob.content.nbytes for blob in blobs)

    def keep_at(self, step: int) -> None:
        """Keep a snapshot of the state after so many agreements."""
        self._keeps_at = step

    def agreed(self, step: int, values: Tensor, about: AgreementNote) -> None:
        """Note the mean of agreement `step`, before it is applied."""
        if self._state is not None and self._is_idle():
            self._drop()
        if self._state is not None:
            self._means[step] = Blob(step, values.clone(), about)
            logged = sum(mean.content.nbytes for mean in self._means.values())
            if logged > max(self._state.content.nbytes, LOGGED_NBYTES):
                self._drop()

    def applied(self, step: int) -> None:
        """Take the snapshot if this is the step for it."""
        if self._keeps_at == step:
            self._drop()
            self._state, self._asked_at = Blob(step, self._replica.save()), time.monotonic()
        if self._is_idle():
            self._digests.clear()
        else:
            self._digests = _noted(self._digests, step, self._replica)

    def send_on(self, step: int) -> None:
        """As coordinator, send the mean of agreement `step` to newcomers that have all but caught up."""
        mean, now = self._means.get(step), time.monotonic()
        self._followers = {m: at for m, at in self._followers.items() if now - at < ANSWER_S}
        if mean is not None:
            for member in self._followers:
                self._line.tell(member, repeated(mean, 0))

    def release(self) -> None:
        """Give the memory back: whoever has asked has joined. The next newcomer gets a state of its own."""
        self._asked_at = -IDLE_S
        self._drop()

    def means_since(self, step: int, until: int) -> list[Blob] | None:
        """The means of the agreements from `step` to before `until`; None if one is missing."""
        found = [self._means.get(each) for each in range(step, until)]
        return [mean for mean in found if mean is not None] if step >= 0 and all(found) else None

    def answer(self, step: int, *, begun: bool) -> None:
        """Answer what newcomers have asked since the last call."""
        wishes = self._line.wishes
        while wishes:
            wish, self._asked_at = wishes.popleft(), time.monotonic()
            if wish.kind is MemberKind.WANT:
                if wish.step >= step - LAG:
                    self._followers[wish.sender] = time.monotonic()
                self._line.tell(wish.sender, self._offered(step, begun, wish.step))
            else:
                blob = self._means.get(wish.step) if wish.flag else self._state
                number, checksum = wish.detail & _LOW, wish.detail >> 32
                found = blob.chunk(number, checksum) if blob and blob.step == wish.step else NOTHING
                self._line.tell(wish.sender, pack(MemberKind.CHUNK, 0, wish.step, number, wish.flag, body=found))

    def _offered(self, step: int, begun: bool, at: int) -> Frame:
        blobs = [self._state, *self._means.values()] if self._state else []
        listed = tuple((b.step, b.content.nbytes, b.about) for b in blobs if b)
        sums = np.array([each for b in blobs if b for each in b.checksums], dtype="<u4")
        body = torch.from_numpy(sums.view(np.uint8)) if len(sums) else NOTHING
        text = json.dumps(to_plain(StateOffer(at, self._digests.get(at), listed)))
        return pack(MemberKind.OFFERED, 0, step, flag=begun, body=body, text=text)

    def _is_idle(self) -> bool:
        return time.monotonic() - self._asked_at > IDLE_S

    def _drop(self) -> None:
        self._state, self._means, self._keeps_at = None, {}, NO_MODEL


class Catalogued(NamedTuple):
    """A blob that the coordinator has."""

    step: int
    nbytes: int
    about: AgreementNote | None  # of a mean: how it is applied
    checksums: tuple[int, ...]

    @property
    def reaches(self) -> int:
        """The agreements that are applied when this is."""
        return self.step + (self.about is not None)


@dataclass
class _Download:
    """A blob on its way."""

    blob: Catalogued
    content: Tensor
    missing: set[int]
    asked: dict[int, tuple[int, float]] = field(default_factory=dict)  # chunks: of whom, and when
    refused: set[tuple[int, int]] = field(default_factory=set)  # (chunk, member) that has another one

    @property
    def is_mean(self) -> bool:
        return self.blob.about is not None

    @classmethod
    def of(cls, blob: Catalogued) -> _Download:
        return cls(blob, torch.empty(blob.nbytes, dtype=torch.uint8), set(range(len(blob.checksums))))


class PullWindow:
    """How many chunks are under way from one member, by when the last ones came.

    All of a window come at once, between two steps of the member: among as many chunks as it has, the longest gap is
    the time in which the link was idle. If that is more than half of the time, the window is doubled, up to `most`; it
    is halved when it is less than a fifth.
    """

    def __init__(self, most: int = MOST_WINDOW) -> None:
        self.size, self._most = WINDOW, most
        self._latest: float | None = None
        self._gaps: list[float] = []

    def pause(self) -> None:
        """Nothing is asked for a while: the next wait says nothing about the link."""
        self._latest, self._gaps = None, []

    def came(self, now: float) -> None:
        """Note a chunk."""
        if self._latest is not None:
            self._gaps.append(now - self._latest)
        self._latest = now
        if len(self._gaps) < self.size:
            return
        idle_s, took_s = max(self._gaps), sum(self._gaps) - max(self._gaps)
        if idle_s > took_s and 4 * took_s < ANSWER_S:
            self.size = min(2 * self.size, self._most)
        elif 4 * idle_s < took_s:
            self.size = max(self.size // 2, WINDOW)
        self._gaps = []


class Loader:
    """A newcomer's side: pulls the state, and the means of later agreements, until it has caught up.

    Args:
        load: takes over a state after so many agreements.
        repeat: applies the mean of an agreement.

    Attributes:
        step: agreements applied here; NO_MODEL before the state has come.
        is_ready: the newcomer may join: it has caught up, or the state is sent when it has joined.
        received_nbytes: so far.
    """

    def __init__(
        self,
        line: Line,
        replica: Replica,
        load: Callable[[Tensor, int], None],
        repeat: Callable[[Tensor, int, AgreementNote], None],
    ) -> None:
        self._line, self._replica, self._load, self._repeat = line, replica, load, repeat
        self._is_needless = 4 * replica.weights.values.nbytes <= SMALL_NBYTES  # weights, and an optimiser's three
        self.step, self.is_ready, self.received_nbytes = NO_MODEL, self._is_needless, 0
        self._downloads: list[_Download] = []  # in the order in which they are applied
        self._asked_at, self._states, self._view, self._is_verified = 0.0, 0, 0, False
        self._digests: dict[int, int] = {}  # of the weights after the last steps
        # A member that spreads messages over connections waits where their queues are full.
        most = MOST_WINDOW if line.connections == 1 else QUEUE * line.connections
        self._windows = defaultdict[int, PullWindow](lambda: PullWindow(most))

    def go_on(self, view: View) -> None:
        """Use what has come, and ask for what is missing; does not wait."""
        if self._is_needless:
            return
        if view.number != self._view:  # another coordinator may be on another branch
            self._view, self.is_ready, self._is_verified, self._asked_at = view.number, False, False, 0.0
        while self._line.handed:
            message = self._line.handed.popleft()
            if message.kind is MemberKind.CHUNK:
                self._take(message, view.coordinator)
            elif message.kind is MemberKind.REPEAT:
                self._follow(message)
            elif message.sender == view.coordinator:
                self._choose(message)
        if time.monotonic() - self._asked_at > ASK_S:
            self._asked_at = time.monotonic()
            self._line.tell(view.coordinator, pack(MemberKind.WANT, view.number, self.step))
        self._pull(view)

    def _choose(self, offer: MemberMessage) -> None:
        """Decide what to download, by what the coordinator has."""
        if not offer.flag:  # nothing is trained yet
            self.is_ready = True
            return
        about, catalogue = _catalogue(offer)
        own, theirs = self._digests.get(about.at), about.digest
        if None not in (own, theirs):
            self._is_verified = own == theirs
            if own != theirs:  # those who had made these steps are gone
                self.step, self._downloads, self._digests = NO_MODEL, [], {}
        self.is_ready = self._is_verified and self.step >= offer.step - LAG
        self._downloads = [each for each in self._downloads if each.blob in catalogue]
        if not catalogue or self.step >= offer.step:
            return
        ahead = self._downloads[-1].blob.reaches if self._downloads else self.step
        due = [blob for blob in catalogue[1:] if blob.step >= ahead]
        if (not due and not self._downloads) or (due and due[0].step > ahead):
            self._states += 1
            self._downloads, due = [], catalogue
        if self._states > MOST_STATES:
            self.step, self.is_ready, self._is_needless, self._downloads = NO_MODEL, True, True, []
            return
        self._downloads += map(_Download.of, due)

    def _pull(self, view: View) -> None:
        """Ask members for missing chunks, a window of each at a time."""
        now = time.monotonic()
        if not self._downloads:
            for window in self._windows.values():
                window.pause()
        free = {member: self._windows[member].size for member in view.ids if self._line.has_reached(member)}
        for load in self._downloads:
            load.asked = {c: (m, at) for c, (m, at) in load.asked.items() if m in free and now - at < ANSWER_S}
            for member, _ in load.asked.values():
                free[member] -= 1
        for load in self._downloads:
            for chunk in sorted(load.missing - load.asked.keys()):
                able = [m for m in free if free[m] > 0 and (chunk, m) not in load.refused]
                if not any(count > 0 for count in free.values()):
                    return
                if able:
                    member = max(able, key=free.__getitem__)
                    free[member] -= 1
                    load.asked[chunk] = (member, now)
                    which = load.blob.checksums[chunk] << 32 | chunk
                    self._line.tell(member, pack(MemberKind.PULL, view.number, load.blob.step, which, load.is_mean))

    def _take(self, message: MemberMessage, coordinator: int) -> None:
        chunk, data = message.detail, message.body.view(torch.uint8)
        about = (message.step, bool(message.flag))
        load = next((each for each in self._downloads if (each.blob.step, each.is_mean) == about), None)
        if load is None or chunk not in load.missing:
            return
        load.asked.pop(chunk, None)
        room = load.content[chunk * CHUNK_NBYTES : (chunk + 1) * CHUNK_NBYTES]
        if data.numel() != room.numel() or zlib.crc32(data.numpy().data) != load.blob.checksums[chunk]:
            if message.sender != coordinator:
                load.refused.add((chunk, message.sender))
            return
        room.copy_(data)
        self.received_nbytes += data.numel()
        load.missing.remove(chunk)
        self._windows[message.sender].came(time.monotonic())
        while self._downloads and not self._downloads[0].missing:
            self._finish(self._downloads.pop(0))

    def _follow(self, message: MemberMessage) -> None:
        """Apply the mean of the agreement that the members have just made."""
        if message.step == self.step:
            self._downloads = []
            self._repeat(message.body, message.step, message.read(AgreementNote))
            self._note(self.step + 1)

    def _finish(self, load: _Download) -> None:
        blob, self._asked_at = load.blob, 0.0
        if blob.about is None:
            self._load(load.content, blob.step)
        else:
            self._repeat(load.content.view(torch.float32), blob.step, blob.about)
        self._note(blob.reaches)

    def _note(self, step: int) -> None:
        self.step = step
        self._digests = _noted(self._digests, step, self._replica)


def repeated(mean: Blob, view: int) -> Frame:
    """The message by which a worker makes up for one agreement."""
    body, text = mean.content.view(torch.float32), json.dumps(to_plain(mean.about))
    return pack(MemberKind.REPEAT, view, mean.step, text=text, body=body)


def _catalogue(offer: MemberMessage) -> tuple[StateOffer, list[Catalogued]]:
    """Read what an OFFERED says, and what it lists: a state, then means.

    Raises:
        PayloadError: its checksums are not those of what it lists.
    """
    said, found = offer.read(StateOffer), []
    sums = tuple(offer.body.view(torch.uint8).numpy().view("<u4").tolist()) if offer.body.nbytes % 4 == 0 else ()
    counts = [-(-nbytes // CHUNK_NBYTES) for _, nbytes, _ in said.blobs]
    if sum(counts) != len(sums) or min(counts, default=0) < 0:
        raise PayloadError(f"OFFERED from worker {offer.sender}: {len(sums)} checksums of {sum(counts)} chunks")
    for (step, nbytes, about), count in zip(said.blobs, counts, strict=True):
        found.append(Catalogued(step, nbytes, about, sums[:count]))
        sums = sums[count:]
    return said, found
