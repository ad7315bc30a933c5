"""Combine the members' vectors, and commit a step on all members or on none.

Caller: `job.py`. This file does not know what the vectors are (gradients, weights) or how they travel: `vectors.py`.

A step of a view: members sum their vectors among themselves, and tell the coordinator when they have the sum. When all
have it, the coordinator tells all to apply it. Where vectors are `Collected` instead, members send theirs to the
coordinator, which combines them in the members' order and sends all the same result. Either way members say that they
hold the step once it is applied. The coordinator goes on once one member does, so that two workers hold every update
that a user has seen. When the view changes, the step is repeated unless a member had applied it.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from typing import NoReturn

from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.line import Line, NewView
from laconic.consistency.elastic.meeting import View
from laconic.consistency.elastic.membership import Membership
from laconic.consistency.elastic.messages import AgreementNote, MemberKind, MemberMessage, Paces
from laconic.consistency.elastic.vectors import Collected, Mean, Occasion, Offer, Unreadable, collect
from laconic.consistency.elastic.view_transport import ViewTransport
from laconic.consistency.elastic.watch import TICK_S, MemberWatch, Standing
from laconic.errors import PayloadError
from laconic.transports.liveness import LostPeer
from laconic.workloads.order import Parts

FINISH_S = 30.0  # how long the coordinator tries to write that the training is over
WORD_S = 0.1  # how often a member that waits in an exchange says so: who says nothing at all is lost


class Group:
    """One member's part in every step of its group."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership
        self.wire, self.deadline, self.options = membership.wire, membership.deadline, membership.options
        self._committed_at = self._spoken_at = 0.0
        self.pace = 0  # nanoseconds that a sample takes here; 0: unknown
        self._transport: ViewTransport | None = None

    # its member

    @property
    def watch(self) -> MemberWatch:
        """The watch over the members, and this worker's progress."""
        return self._membership.watch

    @property
    def line(self) -> Line:
        """What members say to each other."""
        return self.watch.line

    @property
    def standing(self) -> Standing:
        """How far this worker is."""
        return self.watch.standing

    @property
    def view(self) -> View:
        """The present view."""
        return self.watch.view

    @property
    def is_alone(self) -> bool:
        """Whether the present view has no other member."""
        return len(self.view.ids) == 1

    @property
    def changed(self) -> bool:
        """Whether there is a newer view: settle."""
        return self._membership.pending is not None

    @property
    def only_joined(self) -> bool:
        """Whether the newer view has the same members, and newcomers after them."""
        view, ids = self._membership.pending, self.view.ids
        return view is not None and view.ids[: len(ids)] == ids

    def settle(self) -> None:
        """Enter the newest view between steps, and take over its model; Fenced if the view excludes this worker."""
        self._membership.settle()

    def rejoin(self) -> None:
        """Come back as a newcomer after Fenced, and leave a record of it."""
        self._membership.rejoin()

    def leave(self) -> None:
        """Leave the group, and announce it."""
        self.line.close()

    @contextlib.contextmanager
    def _in_view(self) -> Iterator[None]:
        """End the block when the view changes; `changed` is then True."""
        try:
            yield
        except NewView as news:
            self._membership.pending = news.view

    # steps

    def agree(self, samples: int, of_all: int) -> Mean | None:
        """Return the mean of all members' `wire.values`; None if the view changes: repeat the step.

        This worker's values are a mean over `samples` (0: they have no weight) of the step's `of_all` samples.
        """
        occasion = Occasion(self.standing.step, self.watch.place, of_all)
        with self._in_view():
            if self.watch.is_coordinator:
                self.watch.welcome()
            if isinstance(self.wire, Exchanged):
                return self._share(self.wire, samples, occasion)
            if self.watch.is_coordinator:
                return self._collect(self.wire, samples, occasion)
            return self._contribute(self.wire, samples, occasion)
        return None

    def missed(self) -> Mean | None:
        """Return the mean of the present step if the others made it without this worker; does not wait.

        Inside a block of steps, also check whether the view has changed, or has to.
        """
        with self._in_view():
            try:
                return self._missed()
            finally:
                self.watch.hand_out()
        return None

    def _missed(self) -> Mean | None:
        loses = self.options.leaves_out or self.standing.at_stake
        if self.watch.is_coordinator:
            if self.standing.at_stake:
                self.watch.look_after()
            return None
        while True:
            message = self.line.next(0.0)
            if message is None and loses and not self.line.reaches(self.view.coordinator):
                message = self._hear_unless_back()
            if message is None:
                return None
            is_mean = message.kind is MemberKind.MEAN and message.step == self.standing.step
            if is_mean and loses and not isinstance(self.wire, Exchanged):
                return self._mean(self.wire, message)

    def note(self, mean: Mean, parts: Parts) -> None:
        """Keep an agreed mean for newcomers that load the state, before it is applied."""
        ids = [self.view.ids[place] for place in mean.included]
        about = AgreementNote(parts, mean.included, tuple(ids), tuple(mean.paces.items()), self.is_alone)
        self.watch.handover.agreed(self.standing.step, mean.values, about)

    def _announce_keeping(self) -> None:
        """Have all members keep the state after this step, if a newcomer waits for it."""
        if self.watch.handover.is_wanted:
            self.watch.say(MemberKind.KEEP)
            self.line.keeps_at = self.standing.step

    def _hear_unless_back(self) -> MemberMessage | None:
        """The coordinator's next message; None as soon as it can be reached again: within a block it sends none."""
        for message in self.watch.heard(2 * self.watch.limit_s):
            if message is not None or self.line.reaches(self.view.coordinator):
                return message
        return None

    # vectors that members sum among themselves

    def _share(self, wire: Exchanged, samples: int, occasion: Occasion) -> Mean:
        """Sum with all members; return the sum once the coordinator has committed it."""
        watch, step = self.watch, self.standing.step
        self._spoken_at = time.monotonic()
        if self._transport is None or self._transport.view is not self.view:
            self._transport = ViewTransport(self.line, self._until)
        try:
            values = wire.share(samples, occasion, self._transport, self._transport.hosts)
        except PayloadError as error:
            self._refuse(error)
        progress = self.line.progress
        if watch.is_coordinator:
            self._until(lambda: all(progress.ready.get(member) == step for member in watch.others))
            self._announce_keeping()
            watch.say(MemberKind.COMMIT, text=json.dumps(list(self._paces().items())))
        else:
            watch.say(MemberKind.READY, self.pace)
            self._until(lambda: progress.committed == step)
        return Mean(values, tuple(range(len(self.view.ids))), self._paces())

    def _paces(self) -> dict[int, int]:
        """What the coordinator knows of all members' speed; nothing where shares are equal."""
        if self.options.shares != "speed":
            return {}
        own = {self.watch.id: self.pace} if self.watch.is_coordinator else {}
        return {member: pace for member, pace in (self.line.progress.paces | own).items() if pace}

    def _until(self, done: Callable[[], bool]) -> None:
        """Wait in an exchange until `done`; raises NewView if a member is lost."""
        watch = self.watch
        since, heard = time.monotonic(), watch.heard(2 * watch.limit_s)
        while not done():
            self._say_waiting()
            if watch.is_coordinator:
                if self.line.next(TICK_S) is None or self.line.progress.unreadable:
                    self._judge(since)
            elif (message := next(heard)) is not None and message.sender == self.view.coordinator:
                heard = watch.heard(2 * watch.limit_s)

    def _judge(self, since: float) -> None:
        """As coordinator, propose a view without members that are gone, silent, unreadable or unreachable."""
        watch, progress, limit_s = self.watch, self.line.progress, self.watch.limit_s
        if progress.unreadable:
            watch.propose(progress.unreadable.values())
        watch.replace(watch.others)
        silent = [m for m in watch.others if self.line.waited_s(progress.said_since(m, since)) > limit_s]
        watch.replace(silent, since, limit_s)
        if (apart := progress.apart(self.options.silence_s)) and not watch.hesitates():
            watch.propose(apart)

    def _say_waiting(self) -> None:
        """Send a sign of life, and the members out of reach, to the coordinator; the coordinator sends it to all."""
        if time.monotonic() - self._spoken_at >= WORD_S:
            self._spoken_at = time.monotonic()
            missed = [member for member in self.watch.others if not self.line.reaches(member)]
            self.watch.say(MemberKind.WAITING, self.watch.bits(missed))

    def _refuse(self, error: PayloadError) -> NoReturn:
        """Have the member whose piece cannot be read removed from the view."""
        assert error.peer is not None
        watch, member = self.watch, self.view.ids[error.peer]
        if member == self.view.coordinator:
            raise PayloadError(f"[worker {watch.id}] {error}") from error
        unreadable = str(Unreadable(member, error))
        if watch.is_coordinator:
            watch.propose([LostPeer(member, watch.id, unreadable)])
        watch.say(MemberKind.UNREADABLE, error.peer, text=unreadable)
        self._until(lambda: False)
        raise AssertionError

    # vectors that the coordinator collects

    def _contribute(self, wire: Collected, samples: int, occasion: Occasion) -> Mean:
        """A member's part of a step."""
        self.watch.say(MemberKind.GRADIENT, samples, body=wire.offer(samples, occasion), text=str(self.pace))
        while True:
            answer = self.watch.hear(2 * self.watch.limit_s)
            if answer.kind is MemberKind.MEAN and answer.step == self.standing.step:
                return self._mean(wire, answer)

    def _mean(self, wire: Collected, message: MemberMessage) -> Mean:
        try:
            values = wire.read(message.body)
        except PayloadError as error:
            what = f"the mean of step {message.step} from worker {message.sender}"
            raise PayloadError(f"[worker {self.watch.id}] {what} cannot be read: {error}") from None
        included = tuple(place for place in range(len(self.view.ids)) if message.detail >> place & 1)
        return Mean(values, included, dict(message.read(Paces, ())))

    def _collect(self, wire: Collected, samples: int, occasion: Occasion) -> Mean:
        """The coordinator's part of a step."""
        watch, step, ids = self.watch, self.standing.step, self.view.ids
        needed = self.options.needed(len(ids))
        own, limit_s = {watch.id: Offer(watch.id, samples, None)}, watch.limit_s
        came = lambda: self.line.offers_for(step) | own  # noqa: E731
        offers = collect(ids, needed, came, lambda missing: watch.wait_for(missing, limit_s), self.options.grace_s)
        included = [offer.member for offer in offers]
        try:
            body, values = wire.combine(offers, occasion, len(watch.others))
        except Unreadable as error:
            watch.propose([LostPeer(error.member, watch.id, str(error))])
        self._announce_keeping()
        if body is not None:
            watch.say(MemberKind.MEAN, watch.bits(included), body=body, text=json.dumps(list(self._paces().items())))
        return Mean(values, tuple(map(ids.index, included)), self._paces())

    # the end of a step

    def commit(self) -> bool:
        """Record that this worker applied the mean; the coordinator waits until another member has it too.

        Returns whether two workers hold the step, or there is only one. If not, settle: the step stands unless Fenced.
        """
        watch, standing = self.watch, self.standing
        if self.line.keeps_at == standing.step:
            self.watch.handover.keep_at(standing.step + 1)
        standing.step, standing.at_stake, standing.parts = standing.step + 1, 0, 0
        self.watch.handover.applied(standing.step)
        now, limit_s = time.monotonic(), watch.limit_s
        if not standing.fresh:
            self.deadline.observe(now - self._committed_at)
        self._committed_at, standing.fresh = now, False
        watch.trust()
        if standing.new and not self.line.is_loaded_from:
            watch.handover.release()
        standing.new.clear()
        if not watch.is_coordinator:
            watch.say(MemberKind.HELD)
            return True
        holding, step = self.line.holding, standing.step
        with self._in_view():
            watch.wait_for(lambda: [] if step in holding.values() else watch.others, limit_s)
            watch.handover.send_on(step - 1)
            return True
        return False

    # the end

    def finish(self) -> bool:
        """Wait until all members have made the last step; False if the view changes: settle, then call it again."""
        watch, finishing = self.watch, self.line.finishing
        self.standing.ending = True
        with self._in_view():
            if watch.is_coordinator:
                watch.wait_for(lambda: [m for m in watch.others if m not in finishing], watch.limit_s)
                meeting, step = self._membership.meeting, self.standing.step
                error = meeting.finish(step)
                watch.say(MemberKind.DONE)
                if error is not None:  # members need not wait until it can be written; who was away must read it
                    meeting.finish_within(min(FINISH_S, self.options.outage_s), step)
            else:
                watch.say(MemberKind.FINISH)
                while watch.hear(2 * self.deadline.seconds).kind is not MemberKind.DONE:
                    pass
            return True
        return False
