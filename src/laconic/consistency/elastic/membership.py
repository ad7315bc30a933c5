"""Who trains together: numbered views, failover, and one state for all.

Caller: `group.py`, whose base this is. A view is a numbered list of members; its first member is the coordinator. When
somebody joins, leaves or is lost, the first living member publishes the next view (`meeting.py`: only one can). In the
new view members report how many steps they have applied; the most advanced is right, everyone behind it gets its state,
and the step under way is done again if nobody had made it. Whatever is said in an older view is ignored.

Invariant: members of one view that have applied as many steps hold the same bits.
"""

from __future__ import annotations

import time

from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.line import Line, NewView
from laconic.consistency.elastic.meeting import Meeting, View, event
from laconic.consistency.elastic.messages import MemberKind, MemberMessage, pack
from laconic.consistency.elastic.options import Deadline, ElasticOptions
from laconic.consistency.elastic.outage import RETRY_S, Outage, outlast
from laconic.consistency.elastic.reachability import CutOffCheck
from laconic.consistency.elastic.replica import Replica
from laconic.consistency.elastic.vectors import Collected
from laconic.consistency.elastic.watch import LOGGER, NO_MODEL, TICK_S, MemberWatch, model_lost
from laconic.errors import BadInput, PeerLost, StorageError

LOOK_S = 0.08  # how often the meeting folder is looked into while nobody answers
ASK_AGAIN_S = 1.0  # a coordinator may have changed its mind about us, or its role, without a new view


class TrainingOver(Exception):
    """The training was over before this worker came."""


class Fenced(Exception):
    """The others have gone on without this worker: it is out, and may come back as a newcomer."""


def found(line: Line, job: str, outage_s: float) -> View | None:
    """The first view, with this worker alone, if nobody has made one yet."""
    meeting = line.meeting
    alone = View(1, ((line.id, line.address),), job, time.time())
    return alone if outlast(meeting.newest, meeting.folder, outage_s) is None and meeting.publish(alone) else None


def join(line: Line, job: str, patience_s: float, outage_s: float) -> View:
    """Wait until a view holds this worker, who would train `job`.

    Raises:
        PeerLost: nobody is reached in `patience_s`.
        StorageError: the folder cannot be read for `outage_s`.
    """
    seen, asked_at, quiet_since = 0, 0.0, time.monotonic()
    while True:
        newest = outlast(line.meeting.newest, line.meeting.folder, outage_s)
        assert newest is not None
        if newest.job != job:
            raise BadInput(f"the job in {line.meeting.folder} trains {newest.job}; this worker has {job}")
        if line.id in newest.ids:
            return newest
        if newest.number != seen:
            seen, asked_at, quiet_since = newest.number, 0.0, time.monotonic()
        if time.monotonic() - asked_at > ASK_AGAIN_S and line.ask(newest):
            asked_at = time.monotonic()
        view = line.invitation(LOOK_S if asked_at else TICK_S)
        if view is not None:
            return view
        if outlast(lambda: line.meeting.finished, line.meeting.folder, outage_s):
            raise TrainingOver
        if line.has_reached(newest.coordinator):
            quiet_since = time.monotonic()  # it lives, and answers between two steps
        if time.monotonic() - quiet_since > patience_s:
            where = f"[worker {line.id}] not all of view {newest.number} in {line.meeting.folder} can be reached"
            cure = "if all are gone, so is the model: begin in another folder"
            raise PeerLost(f"{where} within {patience_s:g} s; {cure}", rank=line.id, peer=newest.coordinator)


class Membership(MemberWatch):
    """One worker's place in a group."""

    def __init__(
        self,
        meeting: Meeting,
        replica: Replica,
        wire: Collected | Exchanged,
        deadline: Deadline,
        options: ElasticOptions,
        period: int,
    ) -> None:
        super().__init__(replica, deadline, options, period)
        self.meeting, self.wire = meeting, wire
        self._job = replica.signature
        self.begin()

    # coming and going

    def begin(self, patience_s: float | None = None) -> None:
        """Come in as a newcomer, under a number of its own; blocks until a view holds this worker.

        Somebody must be reached within `patience_s`; None: the deadline's patience.
        """
        self._reset()
        self.wire.forget()
        number, outage_s = self._number(), self.options.outage_s
        self._line = outlast(lambda: Line(self.meeting, number, self.options.silence_s), self.meeting.folder, outage_s)
        self._pending: View | None = None
        try:
            self._pending = found(self._line, self._job, outage_s)
            if self._pending is not None:
                self.step = 0
            else:
                self._pending = join(self._line, self._job, patience_s or self.deadline.patience_s, outage_s)
        except BaseException:
            self._line.close()
            raise

    def _number(self) -> int:
        """A number for this worker; where the job is there, but its folder cannot be written to, it is waited for."""
        folder, outage_s = self.meeting.folder, self.options.outage_s
        outage = Outage(f"a number in {folder}", outage_s, "the model is with the members")
        while True:
            try:
                return self.meeting.number()
            except StorageError as error:
                if outlast(lambda: self.meeting.finished, folder, outage_s):
                    raise TrainingOver from None
                if outlast(self.meeting.newest, folder, outage_s) is None:
                    raise StorageError(f"workers cannot meet in {folder}: {error}", error.errno) from error
                outage.failed(error)
                time.sleep(RETRY_S)

    @property
    def changed(self) -> bool:
        """Whether there is a newer view: settle."""
        return self._pending is not None

    def rejoin(self) -> None:
        """Come back as a newcomer after Fenced, and leave a record of it."""
        old, made = self.id, self.steps
        LOGGER.warning("the others went on without worker %d: it comes back as a newcomer", old)
        self.begin(max(self.deadline.patience_s, self.options.outage_s))
        if self._pending is not None:
            self.meeting.record([event(self._pending, made, self.id, f"rejoined: had been worker {old}")])

    def leave(self) -> None:
        """Go, and say so."""
        self._line.close()

    # views

    def settle(self) -> None:
        """Enter the newest view, with the model that is right in it, between steps; Fenced when not in it."""
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

    def _enter(self, view: View) -> None:
        if self.id not in view.ids:
            raise Fenced
        self._new = (self._new | set(view.ids) - set(self.view.ids)) & set(view.ids)
        self._line.turn_to(view)
        LOGGER.info("worker %d enters view %d of members %s", self.id, view.number, view.ids)
        if self._is_coordinator:
            self._gather_reports()
        else:
            self._report()
        self._pending = None
        self._fresh, self._admits_at, self._cut_off = True, 0.0, CutOffCheck()

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
            elif message.kind is MemberKind.REPORT:
                reports[message.sender] = message.step
                self._begun |= bool(message.flag)
        newest = max(reports.values())
        if newest == NO_MODEL:
            raise model_lost(self.id)
        if self.step < newest:
            self._catch_up(next(member for member in reports if reports[member] == newest))
        behind = [member for member in self._others if reports[member] < newest]
        self._begun |= self.step > 0 or len(self.view.ids) >= self.options.workers
        self._held = not self._begun
        self._new |= set(behind)
        self._line.receiving = set(behind)
        places = sum(1 << self.view.ids.index(member) for member in behind)
        self._tell_all(pack(MemberKind.START, self.view.number, newest, places, not self._held))
        if behind:
            state = pack(MemberKind.STATE, self.view.number, newest, body=self.replica.save())
            for member in behind:
                self._line.tell(member, state)

    def _catch_up(self, holder: int) -> None:
        """Fetch the state of a member that is further on; the others are not to think this one lost meanwhile."""
        self.say_busy(True)
        try:
            self._line.tell(holder, pack(MemberKind.FETCH, self.view.number, self.step))
            while True:
                message = self._line.next(TICK_S)
                if message is None:
                    self._replace([holder], time.monotonic(), None)
                elif message.kind is MemberKind.STATE and message.sender == holder:
                    return self._take(message)
        finally:
            self.say_busy(False)

    def _report(self) -> None:
        """A member's part: say how far it is; give or take the state."""
        self._line.tell(self.view.coordinator, pack(MemberKind.REPORT, self.view.number, self.step, flag=self._begun))
        waits: float | None = 2 * self._limit_s
        while True:
            message = self._hear(waits if self.step != NO_MODEL else None)
            if message.kind is MemberKind.FETCH:
                body = self.replica.save()
                self._line.tell(self.view.coordinator, pack(MemberKind.STATE, self.view.number, self.step, body=body))
            elif message.kind is MemberKind.START:
                self._held = not message.flag
                self._begun |= not self._held
                self._new |= {m for place, m in enumerate(self.view.ids) if message.detail >> place & 1}
                if message.step == self.step:
                    return
                waits = None  # the state takes as long as it takes; a broken connection is noticed
            elif message.kind is MemberKind.STATE:
                self._take(message)
                return self._tell_all(pack(MemberKind.HELD, self.view.number, self.step))

    def _take(self, message: MemberMessage) -> None:
        self.replica.load(message.body)
        self.step = message.step
        self.wire.resume(self.step, self.id in self.replica.included)
