"""Who is still there: what a member hears, whom it takes for lost, and the next view that follows.

Caller: `membership.py`, whose base this is. All runs on the worker's own thread; ZeroMQ's threads only move bytes and
answer heartbeats.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterator
from typing import NoReturn

from laconic.consistency.elastic.line import Line, NewView
from laconic.consistency.elastic.meeting import View
from laconic.consistency.elastic.messages import MAX_MEMBERS, MemberKind, MemberMessage, pack
from laconic.consistency.elastic.options import Deadline, ElasticOptions
from laconic.consistency.elastic.outage import RETRY_S, Outage
from laconic.consistency.elastic.reachability import CutOffCheck
from laconic.consistency.elastic.replica import Replica
from laconic.errors import PeerLost, StorageError
from laconic.transports.frame import Frame

LOGGER = logging.getLogger("laconic.consistency")
NO_MODEL = -1
TICK_S = 0.02
CUT = "its connection broke"
SILENT = "nothing came from it for {:.3g} s"


def model_lost(worker: int) -> PeerLost:
    """Nobody is left to get the model from."""
    return PeerLost(f"[worker {worker}] everyone who had the model is gone", rank=worker)


class MemberWatch:
    """One worker's eyes on the others of its view; `period` is the most steps from one agreement to the next.

    Attributes:
        step: agreements applied to the replica so far; NO_MODEL before the first state has come.
        at_stake: steps made since the last agreement, which are lost when the view changes.
    """

    _line: Line

    def __init__(self, replica: Replica, deadline: Deadline, options: ElasticOptions, period: int) -> None:
        self.replica, self.deadline, self.options, self._period = replica, deadline, options, period
        self._reset()

    def _reset(self) -> None:
        """As a newcomer is."""
        self.step, self.at_stake = NO_MODEL, 0
        self._new: set[int] = set()  # members that have not made a step with us yet
        self._held = self._begun = self._fresh = self._ending = False
        self._cut_off = CutOffCheck()
        self._admits_at = 0.0  # newcomers wait until then, for the folder refused the view with them in it

    @property
    def id(self) -> int:
        """This worker's number."""
        return self._line.id

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes sent so far."""
        return self._line.sent_nbytes

    @property
    def view(self) -> View:
        """The present view."""
        return self._line.view

    @property
    def place(self) -> int:
        """This worker's place among the members of the view."""
        return self.view.ids.index(self.id)

    @property
    def steps(self) -> int:
        """Steps committed so far: more than `step` where members agree on blocks of steps."""
        return int(self.replica.extra.get("steps", self.step))

    @property
    def _is_coordinator(self) -> bool:
        return self.view.coordinator == self.id

    @property
    def _others(self) -> list[int]:
        return [member for member in self.view.ids if member != self.id]

    def _hear(self, waits_s: float | None) -> MemberMessage:
        """The next message from the coordinator; when that is lost, the next in line takes over.

        It may be silent for `waits_s`; None: as long as its connection stands.
        """
        return next(message for message in self._heard(waits_s) if message is not None)

    def _heard(self, waits_s: float | None) -> Iterator[MemberMessage | None]:
        """As `_hear`, with pieces of any member, and with None after every moment in which nothing came."""
        since, watched = time.monotonic(), self.view.coordinator
        suspects: dict[int, str] = {}
        while True:
            message = self._line.next(TICK_S)
            if message is not None:
                if message.sender == self.view.coordinator or message.kind is MemberKind.PIECE:
                    yield message
                continue
            suspects |= {m: CUT for m in self._others if m not in suspects and not self._line.reaches(m)}
            first = next(m for m in self.view.ids if m not in suspects)
            if first == self.id:
                if not self._hesitates():
                    self._line.look()
                    if self.step == NO_MODEL:
                        raise model_lost(self.id)
                    self._propose(suspects)
                yield None
                continue
            if first != watched:
                since, watched, waits_s = time.monotonic(), first, 2 * self.deadline.seconds
            if waits_s is not None and self._line.waited_s(since) > waits_s:
                suspects[watched] = SILENT.format(waits_s)
            yield None

    def _look_around(self) -> None:
        """The coordinator, between steps: change the view when somebody has come or gone; wait for enough to begin."""
        while True:
            self._look_after()
            if self._line.has_newcomers() and len(self.view.ids) < MAX_MEMBERS and time.monotonic() > self._admits_at:
                self._admit()
            if not self._held:
                return
            self._line.next(TICK_S)

    def _look_after(self) -> None:
        """The coordinator, at any time: take in what has come, and change the view when somebody has gone."""
        while self._line.next(0.0) is not None:
            pass
        self._replace(self._others, 0.0, None)

    def _wait_for(self, missing: Callable[[], list[int]], limit_s: float) -> None:
        """The coordinator: wait until nobody is `missing`; go on without those who are gone or silent."""
        since = time.monotonic()
        while absent := missing():
            if self._line.next(TICK_S) is None:
                self._replace(absent, since, limit_s)

    def _replace(self, missing: list[int], since: float, limit_s: float | None) -> None:
        """The coordinator: go on without those of the `missing` who cannot be reached, or are silent for `limit_s`."""
        gone = {m: CUT for m in missing if not self._line.reaches(m)}
        if limit_s is not None and self._line.waited_s(since) > limit_s:
            gone = {m: SILENT.format(limit_s) for m in missing} | gone
        if gone and not self._hesitates():
            self._propose(gone)

    def _hesitates(self) -> bool:
        """Whether to wait for a view that the others may make: long enough for them to miss this worker's heartbeat."""
        return self._cut_off.suspects(self.view, self.id, 2 * self.options.silence_s + self.deadline.seconds)

    @property
    def _limit_s(self) -> float:
        """How long a step may take; a newcomer's first is not judged by the others' past steps."""
        return max(self.deadline.seconds, self.deadline.patience_s) if self._new else self.deadline.seconds

    def _propose(self, lost: dict[int, str]) -> NoReturn:
        """Publish the next view, without the lost and with the newcomers; raises NewView with whichever is valid."""
        for member, why in lost.items():
            LOGGER.warning("worker %d goes on without worker %d: %s", self.id, member, why)
        redo = self._period if self._begun and not self._ending else 0  # others may be further in it than this one
        cure = "save it elsewhere, as with torch.save(model.state_dict(), path), and begin again in another folder"
        kept = f"the model after {max(0, self.steps)} steps is in this worker's memory: {cure}"
        outage = Outage(f"[worker {self.id}] view {self.view.number + 1}", self.options.outage_s, kept)
        try:
            while True:
                try:
                    raise NewView(self._line.propose(lost, max(0, self.steps), redo))
                except StorageError as error:
                    if not outage.has_begun:
                        self.say_busy(True)  # so that the others wait for it
                    outage.failed(error)
                self._line.next(RETRY_S)  # another may get it written
        finally:
            if outage.has_begun:
                self.say_busy(False)

    def _admit(self) -> None:
        """Take newcomers into the next view, by NewView; where that cannot be written they wait, and members go on."""
        try:
            raise NewView(self._line.propose({}, max(0, self.steps), 0))
        except StorageError as error:
            if not self._admits_at:
                warnings.warn(f"newcomers wait, and worker {self.id} trains on: {error}", stacklevel=2)
            self._admits_at = time.monotonic() + RETRY_S

    def say_busy(self, busy: bool) -> None:
        """Tell all members that no step comes from here for a while, or that it does again."""
        self._tell_all(pack(MemberKind.BUSY, self.view.number, self.step, flag=busy))

    def _tell_all(self, message: Frame) -> None:
        for member in self._others:
            self._line.tell(member, message)
