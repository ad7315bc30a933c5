"""Membership of a group: numbered views, failover, and one state for all.

Caller: `group.py`. A view is a numbered list of members; its first member is the coordinator. When
a member joins, leaves or is lost, the first living member publishes the next view (`meeting.py`: only one can). In the
new view members report how many steps they have applied. Members that are behind receive the state of the most advanced
one, and the step under way is repeated if no member had applied it. Messages of older views are ignored.

Invariant: members of one view that have applied the same number of steps hold the same bits.
"""

from __future__ import annotations

import time

from torch import Tensor

from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.handover import Loader, repeated
from laconic.consistency.elastic.line import Line, NewView
from laconic.consistency.elastic.meeting import Meeting, View, event
from laconic.consistency.elastic.messages import NO_MODEL, AgreementNote, MemberKind, MemberMessage
from laconic.consistency.elastic.options import Deadline, ElasticOptions
from laconic.consistency.elastic.outage import RETRY_S, Outage, outlast
from laconic.consistency.elastic.replica import Replica, StepWork
from laconic.consistency.elastic.vectors import Collected
from laconic.consistency.elastic.watch import LOGGER, TICK_S, MemberWatch, model_lost
from laconic.errors import BadInput, PeerLost, StorageError

LOOK_S = 0.08  # how often the meeting place is looked at while nobody answers
ASK_AGAIN_S = 1.0  # a coordinator may have changed its mind about us, or its role, without a new view


class TrainingOver(Exception):
    """The training was over before this worker came."""


class Fenced(Exception):
    """The others went on without this worker; it may come back as a newcomer."""


def found(line: Line, job: str, outage_s: float) -> View | None:
    """Publish the first view, with this worker alone, unless a view exists."""
    meeting = line.meeting
    alone = View(1, ((line.id, line.address),), job, time.time())
    if outlast(meeting.newest, meeting.where, outage_s) is not None:
        return None
    # A view that was published, and whose answer was lost, would keep everybody from this place for ever.
    return alone if outlast(lambda: meeting.publish(alone), meeting.where, outage_s) else None


def join(line: Line, job: str, patience_s: float, outage_s: float, loader: Loader) -> View:
    """Wait until a view holds this worker; `job` describes what it would train.

    Args:
        loader: gets the state first, if it is large.

    Raises:
        PeerLost: nobody is reached in `patience_s`.
        StorageError: the meeting place cannot be read for `outage_s`.
    """
    seen, asked_at, quiet_since, at = 0, 0.0, time.monotonic(), NO_MODEL
    unmet_since, is_told, over_at, newest = time.monotonic(), False, 0.0, None
    while True:
        # A place may be far away: what is known is not asked for again.
        newest = outlast(lambda known=seen: line.meeting.newest(known), line.meeting.where, outage_s) or newest  # type: ignore[misc]
        assert newest is not None
        if newest.job != job:
            cure = "another training needs another meeting place"
            raise BadInput(f"the job in {line.meeting.where} trains {newest.job}; this worker has {job}; {cure}")
        if line.id in newest.ids:
            return newest
        if newest.number != seen:
            seen, asked_at, quiet_since = newest.number, 0.0, time.monotonic()
        if line.meets(newest):
            unmet_since = time.monotonic()
            loader.go_on(newest)
        elif not is_told and time.monotonic() - unmet_since > patience_s:
            is_told = True  # they may only be busy
            LOGGER.warning("[worker %d] waits to join view %d: %s", line.id, newest.number, line.no_way(newest))
        is_due = time.monotonic() - asked_at > ASK_AGAIN_S or loader.step != at
        if is_due and loader.is_ready and line.ask(newest, loader.step):
            asked_at, at = time.monotonic(), loader.step
        view = line.invitation(LOOK_S if asked_at else TICK_S)
        if view is not None:
            return view
        if time.monotonic() - over_at > ASK_AGAIN_S:
            if outlast(lambda: line.meeting.finished, line.meeting.where, outage_s):
                raise TrainingOver
            over_at = time.monotonic()
        if line.has_reached(newest.coordinator) and time.monotonic() - unmet_since < max(patience_s, outage_s):
            quiet_since = time.monotonic()  # it lives, and answers between two steps
        if time.monotonic() - quiet_since > patience_s:
            where = f"[worker {line.id}] not all of view {newest.number} in {line.meeting.where} can be reached"
            cure = "if all are gone, so is the model: begin at another meeting place"
            text = f"{where} within {patience_s:g} s: {line.no_way(newest)}; {cure}"
            raise PeerLost(text, rank=line.id, peer=newest.coordinator)


class Membership:
    """One worker's membership in a group; it gets a new number each time it joins.

    Attributes:
        watch: watches the other members since this worker last joined.
        pending: a view that is newer than the one it is in.
    """

    watch: MemberWatch

    def __init__(
        self,
        meeting: Meeting,
        replica: Replica,
        wire: Collected | Exchanged,
        deadline: Deadline,
        options: ElasticOptions,
        work: StepWork,
    ) -> None:
        self.meeting, self.replica, self.wire, self.work = meeting, replica, wire, work
        self.deadline, self.options = deadline, options
        self.pending: View | None = None
        self.begin()

    # coming and going

    def begin(self, patience_s: float | None = None) -> None:
        """Join as a newcomer, under a new number; blocks until a view holds this worker.

        A member must be reached within `patience_s`; None: the deadline's patience.
        """
        self.wire.forget()
        job, number, outage_s = self.replica.signature, self._number(), self.options.outage_s
        silence_s, connections = self.options.silence_s, self.options.connections_to_peers()
        line = outlast(lambda: Line(self.meeting, number, silence_s, connections), self.meeting.where, outage_s)
        self.watch = MemberWatch(line, self.replica, self.deadline, self.options, self.work.period)
        self.pending = None
        loader = Loader(line, self.replica, self._load, self._repeat)
        try:
            self.pending = found(line, job, outage_s)
            if self.pending is not None:
                self.watch.standing.step, self.watch.standing.is_first = 0, True
            else:
                self.pending = join(line, job, patience_s or self.deadline.patience_s, outage_s, loader)
                self.watch.standing.step = loader.step
        except BaseException:
            line.close()
            raise

    def _number(self) -> int:
        """Get a number for this worker; waits while the meeting place has the job but cannot be written to."""
        where, outage_s = self.meeting.where, self.options.outage_s
        outage = Outage(f"a number in {where}", outage_s, "the model is with the members")
        while True:
            try:
                return self.meeting.number()
            except StorageError as error:
                if outlast(lambda: self.meeting.finished, where, outage_s):
                    raise TrainingOver from None
                # Once, it may only have been slow.
                if outage.has_begun and outlast(self.meeting.newest, where, outage_s) is None:
                    raise StorageError(f"workers cannot meet in {where}: {error}", error.errno) from error
                outage.failed(error)
                time.sleep(RETRY_S)

    def rejoin(self) -> None:
        """Come back as a newcomer after Fenced, and leave a record of it."""
        old, made = self.watch.id, self.watch.steps
        LOGGER.warning("the others went on without worker %d: it comes back as a newcomer", old)
        self.begin(max(self.deadline.patience_s, self.options.outage_s))
        if self.pending is not None:
            self.meeting.record([event(self.pending, made, self.watch.id, f"rejoined: had been worker {old}")])

    # views

    def settle(self) -> None:
        """Enter the newest view between steps, and take over its model; Fenced if the view excludes this worker."""
        watch = self.watch
        while True:
            try:
                if self.pending is not None:
                    self._enter(self.pending)
                if watch.is_coordinator:
                    watch.look_around()
                while watch.standing.held:
                    watch.hear_held()
                return
            except NewView as news:
                self.pending = news.view
                if news.view.ids[: len(watch.view.ids)] != watch.view.ids:
                    watch.standing.parts = 0  # the step under way is lost

    def _enter(self, view: View) -> None:
        watch = self.watch
        if watch.id not in view.ids:
            raise Fenced
        watch.enter(view)
        why = view.why or "the job begins"
        LOGGER.info("worker %d enters view %d of members %s: %s", watch.id, view.number, view.ids, why)
        for member, address in view.members:
            how = ", through a relay" if member == watch.id and watch.line.is_relayed else ""
            LOGGER.info("worker %d is reached at %s%s", member, address.rpartition(":")[0], how)
        if watch.is_coordinator:
            self._gather_reports()
        else:
            self._report()
        self.pending = None
        watch.standing.fresh = True
        watch.trust()

    def _gather_reports(self) -> None:
        """The coordinator's part: find the members that are behind, and have the state sent to them."""
        watch, standing = self.watch, self.watch.standing
        reports = {watch.id: standing.step}
        since = time.monotonic()
        while missing := [member for member in watch.view.ids if member not in reports]:
            message = watch.line.next(TICK_S)
            if message is None:
                watch.replace([m for m in missing if m not in standing.new], since, self.deadline.seconds)
                watch.replace(missing, since, watch.limit_s)
            elif message.kind is MemberKind.REPORT:
                reports[message.sender] = message.step
                standing.begun |= bool(message.flag)
        newest = max(reports.values())
        if newest == NO_MODEL:
            raise model_lost(watch.id)
        if standing.step < newest:
            self._catch_up(next(member for member in reports if reports[member] == newest))
        behind = [member for member in watch.others if reports[member] < newest]
        standing.begun |= standing.step > 0 or len(watch.view.ids) >= self.options.workers
        standing.held = not standing.begun
        standing.new |= set(behind)
        watch.line.receiving = set(behind)
        watch.say(MemberKind.START, watch.bits(behind), not standing.held, text=str(standing.parts))
        repeats = {member: watch.handover.means_since(reports[member], newest) for member in behind}
        for member, means in repeats.items():
            for mean in means or ():
                watch.line.tell(member, repeated(mean, watch.view.number))
        if ignorant := [member for member, means in repeats.items() if means is None]:
            watch.say(MemberKind.STATE, to=ignorant, body=self.replica.save())

    def _catch_up(self, holder: int) -> None:
        """Fetch the state of a more advanced member; meanwhile tell the others that this one is busy."""
        watch = self.watch
        watch.say_busy(True)
        try:
            watch.say(MemberKind.FETCH, to=[holder])
            while True:
                message = watch.line.next(TICK_S)
                if message is None:
                    watch.replace([holder])
                elif message.kind is MemberKind.STATE and message.sender == holder:
                    return self._take(message)
        finally:
            watch.say_busy(False)

    def _report(self) -> None:
        """A member's part: report its steps, then send or receive the state."""
        watch, standing = self.watch, self.watch.standing
        watch.say(MemberKind.REPORT, flag=standing.begun)
        waits: float | None = 2 * watch.limit_s
        newest = standing.step
        while True:
            message = watch.hear(waits if standing.step != NO_MODEL else None)
            if message.kind is MemberKind.FETCH:
                watch.say(MemberKind.STATE, body=self.replica.save())
            elif message.kind is MemberKind.START:
                standing.held, standing.parts, newest = not message.flag, message.read(int, 0), message.step
                standing.begun |= not standing.held
                standing.new |= {m for place, m in enumerate(watch.view.ids) if message.detail >> place & 1}
                if message.step == standing.step:
                    return
                waits = None  # the state takes as long as it takes; a broken connection is noticed
            elif message.kind is MemberKind.STATE:
                self._take(message)
                return watch.say(MemberKind.HELD, to=watch.others)
            elif message.kind is MemberKind.REPEAT and message.step == standing.step:
                self._repeat(message.body, message.step, message.read(AgreementNote))
                standing.step += 1
                if standing.step == newest:
                    return watch.say(MemberKind.HELD, to=watch.others)

    def _take(self, message: MemberMessage) -> None:
        self._load(message.body, message.step)
        self.watch.standing.step = message.step

    def _load(self, block: Tensor, step: int) -> None:
        """Take over a peer's state after `step` agreements."""
        self.work.abandon()
        self.replica.load(block)
        self.wire.resume(step, self.watch.id in self.replica.included)

    def _repeat(self, values: Tensor, step: int, about: AgreementNote) -> None:
        """Apply the mean of an agreement that this worker had no part in."""
        self.work.abandon()
        self.work.be_alone(about.alone)
        self.work.apply(values, about.parts, about.included, dict(about.paces))
        if self.replica.coded_numel:
            self.replica.extra["included"] = list(about.ids)
        self.wire.resume(step + 1, self.watch.id in about.ids)
