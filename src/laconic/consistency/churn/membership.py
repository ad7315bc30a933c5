"""Who trains together: numbered views, failover, and one state for all.

Caller: `group.py`, whose base this is. All runs on the worker's own thread; ZeroMQ's threads only move bytes and answer
heartbeats.

A view is a numbered list of members; its first member is the coordinator. When somebody joins, leaves or is lost, the
first living member publishes the next view (`meeting.py`: only one can). In the new view members report how many steps
they have applied; the most advanced is right, everyone behind it gets its state, and the step under way is done again
if nobody had made it. Whatever is said in an older view is ignored.

Invariant: members of one view that have applied as many steps hold the same bits.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import NoReturn

from torch import Tensor

from laconic.consistency.churn.deadline import Deadline
from laconic.consistency.churn.joining import Fenced, found, join
from laconic.consistency.churn.line import Line, NewView
from laconic.consistency.churn.meeting import Meeting, View, event
from laconic.consistency.churn.messages import MAX_MEMBERS, Kind, Message, pack
from laconic.consistency.churn.replica import Replica
from laconic.consistency.churn.wire import Wire
from laconic.errors import PeerLost

NO_MODEL = -1
TICK_S = 0.02
CUT = "its connection broke"
SILENT = "nothing came from it for {:.3g} s"


class Membership:
    """One worker's place in a group.

    Args:
        workers: how many members the first step waits for.
        silence_s: after so long without a heartbeat a connection counts as broken.
        period: the most steps from one agreement to the next.

    Attributes:
        step: agreements applied to the replica so far; NO_MODEL before the first state has come.
        view: the present one.
        at_stake: steps made since the last agreement, which are lost when the view changes.
    """

    def __init__(
        self,
        meeting: Meeting,
        replica: Replica,
        wire: Wire,
        deadline: Deadline,
        workers: int,
        silence_s: float,
        period: int = 1,
    ) -> None:
        self.meeting, self.replica, self.wire, self.deadline = meeting, replica, wire, deadline
        self._workers, self._silence_s, self._period = workers, silence_s, period
        self._job = replica.signature
        self.begin()

    # coming and going

    def begin(self) -> None:
        """Come in as a newcomer, under a number of its own; blocks until a view holds this worker."""
        self.step, self.at_stake = NO_MODEL, 0
        self.wire.forget()
        self._line = Line(self.meeting, self._silence_s)
        self._pending: View | None = None
        self._new: set[int] = set()  # members that have not made a step with us yet
        self._held = self._begun = self._fresh = self._ending = False
        try:
            self._pending = found(self._line, self._job)
            if self._pending is not None:
                self.step = 0
            else:
                self._pending = join(self._line, self._job, self.deadline.patience_s)
        except BaseException:
            self._line.close()
            raise

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
    def changed(self) -> bool:
        """Whether there is a newer view: settle."""
        return self._pending is not None

    def rejoin(self) -> None:
        """Come back as a newcomer after Fenced, and leave a record of it."""
        old, made = self.id, self.steps
        self.begin()
        if self._pending is not None:
            self.meeting.record([event(self._pending, made, self.id, f"rejoined: had been worker {old}")])

    def leave(self) -> None:
        """Go, and say so."""
        self._line.close()

    # views

    def settle(self) -> None:
        """Enter the newest view, with the model that is right in it; called between steps.

        Raises:
            Fenced: this worker is not in it.
            PeerLost: nobody who is left has the model.
        """
        while True:
            try:
                if self._pending is not None:
                    self._enter(self._pending)
                if self._is_coordinator:
                    self._look_around()
                while self._held:
                    self._hear(None)
                return
            except NewView as news:
                self._pending = news.view

    @property
    def _is_coordinator(self) -> bool:
        return self.view.coordinator == self.id

    @property
    def _others(self) -> list[int]:
        return [member for member in self.view.ids if member != self.id]

    def _enter(self, view: View) -> None:
        if self.id not in view.ids:
            raise Fenced
        self._new = (self._new | set(view.ids) - set(self.view.ids)) & set(view.ids)
        self._line.turn_to(view)
        if self._is_coordinator:
            self._gather_reports()
        else:
            self._report()
        self._pending = None
        self._fresh = True

    def _gather_reports(self) -> None:
        """The coordinator's part: find out who is behind, and send them the state."""
        reports = {self.id: self.step}
        since = time.monotonic()
        while len(reports) < len(self.view.ids):
            message = self._line.next(TICK_S)
            if message is None:
                missing = [m for m in self.view.ids if m not in reports]
                self._replace([m for m in missing if m not in self._new], since, self.deadline.seconds)
                self._replace(missing, since, self._limit_s)
            elif message.kind is Kind.REPORT:
                reports[message.sender] = message.step
                self._begun |= bool(message.flag)
        newest = max(reports.values())
        if newest == NO_MODEL:
            raise self._model_lost()
        if self.step < newest:
            self._catch_up(next(member for member in reports if reports[member] == newest))
        behind = [member for member in self._others if reports[member] < newest]
        self._begun |= self.step > 0 or len(self.view.ids) >= self._workers
        self._held = not self._begun
        self._new |= set(behind)
        self._line.receiving = set(behind)
        places = sum(1 << self.view.ids.index(member) for member in behind)
        self._tell_all(pack(Kind.START, self.view.number, newest, places, not self._held))
        if behind:
            state = pack(Kind.STATE, self.view.number, newest, body=self.replica.save())
            for member in behind:
                self._line.tell(member, state)

    def _catch_up(self, holder: int) -> None:
        """Fetch the state of a member that is further on; the others are not to think this one lost meanwhile."""
        self.say_busy(True)
        try:
            self._line.tell(holder, pack(Kind.FETCH, self.view.number, self.step))
            while True:
                message = self._line.next(TICK_S)
                if message is None:
                    self._replace([holder], time.monotonic(), None)
                elif message.kind is Kind.STATE and message.sender == holder:
                    return self._take(message)
        finally:
            self.say_busy(False)

    def _report(self) -> None:
        """A member's part: say how far it is; give or take the state."""
        self._line.tell(self.view.coordinator, pack(Kind.REPORT, self.view.number, self.step, flag=self._begun))
        waits: float | None = 2 * self._limit_s
        while True:
            message = self._hear(waits if self.step != NO_MODEL else None)
            if message.kind is Kind.FETCH:
                body = self.replica.save()
                self._line.tell(self.view.coordinator, pack(Kind.STATE, self.view.number, self.step, body=body))
            elif message.kind is Kind.START:
                self._held = not message.flag
                self._begun |= not self._held
                self._new |= {m for place, m in enumerate(self.view.ids) if message.detail >> place & 1}
                if message.step == self.step:
                    return
                waits = None  # the state takes as long as it takes; a broken connection is noticed
            elif message.kind is Kind.STATE:
                self._take(message)
                return self._tell_all(pack(Kind.HELD, self.view.number, self.step))

    def _take(self, message: Message) -> None:
        self.replica.load(message.body)
        self.step = message.step
        self.wire.resume(self.step, self.id in self.replica.included)

    def _hear(self, waits_s: float | None) -> Message:
        """The next message from the coordinator; when that is lost, the next in line takes over.

        Args:
            waits_s: how long it may be silent; None: as long as its connection stands.
        """
        return next(message for message in self._heard(waits_s) if message is not None)

    def _heard(self, waits_s: float | None) -> Iterator[Message | None]:
        """As `_hear`, with None after every moment in which nothing came."""
        since, watched = time.monotonic(), self.view.coordinator
        suspects: dict[int, str] = {}
        while True:
            message = self._line.next(TICK_S)
            if message is not None:
                if message.sender == self.view.coordinator:
                    yield message
                continue
            suspects |= {m: CUT for m in self._others if m not in suspects and not self._line.reaches(m)}
            first = next(m for m in self.view.ids if m not in suspects)
            if first == self.id:
                self._line.look()
                if self.step == NO_MODEL:
                    raise self._model_lost()
                self._propose(suspects)
            if first != watched:
                since, watched, waits_s = time.monotonic(), first, 2 * self.deadline.seconds
            if waits_s is not None and self._line.waited_s(since) > waits_s:
                suspects[watched] = SILENT.format(waits_s)
            yield None

    def _look_around(self) -> None:
        """The coordinator, between steps: change the view when somebody has come or gone; wait for enough to begin."""
        while True:
            self._look_after()
            if self._line.has_newcomers() and len(self.view.ids) < MAX_MEMBERS:
                self._propose({})
            if not self._held:
                return
            self._line.next(TICK_S)

    def _look_after(self) -> None:
        """The coordinator, at any time: take in what has come, and change the view when somebody has gone."""
        while self._line.next(0.0) is not None:
            pass
        self._replace(self._others, 0.0, None)

    def _replace(self, missing: list[int], since: float, limit_s: float | None) -> None:
        """The coordinator: go on without those of the `missing` who cannot be reached, or are silent for `limit_s`."""
        gone = {m: CUT for m in missing if not self._line.reaches(m)}
        if limit_s is not None and self._line.waited_s(since) > limit_s:
            gone = {m: SILENT.format(limit_s) for m in missing} | gone
        if gone:
            self._propose(gone)

    @property
    def _limit_s(self) -> float:
        """How long a step may take; a newcomer's first is not judged by the others' past steps."""
        return max(self.deadline.seconds, self.deadline.patience_s) if self._new else self.deadline.seconds

    def _propose(self, lost: dict[int, str]) -> NoReturn:
        """Publish the next view, without the lost and with the newcomers; raises NewView with whichever is valid."""
        redo = self._period if self._begun and not self._ending else 0  # others may be further in it than this one
        raise NewView(self._line.propose(lost, max(0, self.steps), redo, MAX_MEMBERS))

    def _model_lost(self) -> PeerLost:
        return PeerLost(f"[worker {self.id}] everyone who had the model is gone", rank=self.id)

    def say_busy(self, busy: bool) -> None:
        """Tell all members that no step comes from here for a while, or that it does again."""
        self._tell_all(pack(Kind.BUSY, self.view.number, self.step, flag=busy))

    def _tell_all(self, message: Tensor) -> None:
        for member in self._others:
            self._line.tell(member, message)
