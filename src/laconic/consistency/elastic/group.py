"""How members' vectors become one: a step that all or none have made.

Caller: `job.py`. What the vectors are (gradients, weights) and how they travel is not known here: `vectors.py`.

A step of a view: members sum their vectors among themselves, and tell the coordinator when they have the sum. When all
have it, the coordinator tells all to apply it. Where vectors are `Collected` instead, members send theirs to the
coordinator, which combines them in the members' order and sends all the same result. Either way members say that they
hold the step once it is applied; the coordinator goes on once one does, so that an update that anybody has seen is on
two workers. When the view changes the step is done again, unless somebody had made it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NoReturn

from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.line import NewView
from laconic.consistency.elastic.membership import Membership
from laconic.consistency.elastic.messages import MemberKind, MemberMessage, pack
from laconic.consistency.elastic.reachability import CutOffCheck
from laconic.consistency.elastic.vectors import Collected, Mean, Occasion, Offer, Unreadable, collect
from laconic.consistency.elastic.view_transport import ViewTransport
from laconic.consistency.elastic.watch import TICK_S
from laconic.errors import PayloadError

WORD_S = 0.1  # how often a member that waits in an exchange says so: who says nothing at all is lost


class Group(Membership):
    """One worker's membership, and its part in every step."""

    _committed_at = 0.0
    _spoken_at = 0.0
    _mesh: ViewTransport | None = None

    def agree(self, samples: int, of_all: int) -> Mean | None:
        """The mean of all members' `wire.values` at this step, or None when the view changes: do the step again.

        This worker's are the mean over `samples` samples (0: they count for nothing) of the step's `of_all`.
        """
        occasion = Occasion(self.step, self.place, of_all)
        try:
            if isinstance(self.wire, Exchanged):
                return self._share(self.wire, samples, occasion)
            if self._is_coordinator:
                return self._collect(self.wire, samples, occasion)
            return self._contribute(self.wire, samples, occasion)
        except NewView as news:
            self._pending = news.view
            return None

    def missed(self) -> Mean | None:
        """The mean of the present step if the others have made it without this worker; nothing is waited for.

        In the middle of a block of steps it is also seen whether the view has changed, or has to.
        """
        try:
            if self._is_coordinator:
                if self.at_stake:
                    self._look_after()
                return None
            while self.options.drop_slowest or self.at_stake:
                message = self._line.next(0.0)
                if message is None and not self._line.reaches(self.view.coordinator):
                    message = self._hear_unless_back()
                if message is None:
                    return None
                if (
                    message.kind is MemberKind.MEAN
                    and message.step == self.step
                    and not isinstance(self.wire, Exchanged)
                ):
                    return self._mean(self.wire, message)
        except NewView as news:
            self._pending = news.view
        return None

    def _hear_unless_back(self) -> MemberMessage | None:
        """The coordinator's next message; None as soon as it can be reached again: in its block it says nothing."""
        for message in self._heard(2 * self._limit_s):
            if message is not None or self._line.reaches(self.view.coordinator):
                return message
        return None

    # vectors that members sum among themselves

    def _share(self, wire: Exchanged, samples: int, occasion: Occasion) -> Mean:
        """The sum is made by all, and applied once all have it."""
        self._spoken_at = time.monotonic()
        if self._mesh is None or self._mesh.view is not self.view:
            self._mesh = ViewTransport(self._line, self._until)
        try:
            values = wire.share(samples, occasion, self._mesh, self._mesh.hosts)
        except PayloadError as error:
            self._refuse(error)
        progress = self._line.progress
        if self._is_coordinator:
            self._until(lambda: all(progress.ready.get(member) == self.step for member in self._others))
            self._tell_all(pack(MemberKind.COMMIT, self.view.number, self.step))
        else:
            self._line.tell(self.view.coordinator, pack(MemberKind.READY, self.view.number, self.step))
            self._until(lambda: progress.committed == self.step)
        return Mean(values, tuple(range(len(self.view.ids))))

    def _until(self, done: Callable[[], bool]) -> None:
        """Wait in an exchange until `done`; when somebody is lost, by NewView."""
        since, heard = time.monotonic(), self._heard(2 * self._limit_s)
        while not done():
            self._say_waiting()
            if self._is_coordinator:
                if self._line.next(TICK_S) is None or self._line.progress.unreadable:
                    self._judge(since)
            elif (message := next(heard)) is not None and message.sender == self.view.coordinator:
                heard = self._heard(2 * self._limit_s)

    def _judge(self, since: float) -> None:
        """The coordinator: go on without those who are gone, say nothing, or are not to be understood or reached."""
        progress, limit_s = self._line.progress, self._limit_s
        if progress.unreadable:
            self._propose(progress.unreadable)
        self._replace(self._others, since, None)
        silent = [m for m in self._others if self._line.waited_s(progress.said_since(m, since)) > limit_s]
        self._replace(silent, since, limit_s)
        if (apart := progress.apart(self.options.silence_s)) and not self._hesitates():
            self._propose(apart)

    def _say_waiting(self) -> None:
        """Tell the coordinator, or as the coordinator all, that this worker lives, and whom it cannot reach."""
        if time.monotonic() - self._spoken_at < WORD_S:
            return
        self._spoken_at = time.monotonic()
        missed = [place for place, m in enumerate(self.view.ids) if m != self.id and not self._line.reaches(m)]
        message = pack(MemberKind.WAITING, self.view.number, self.step, sum(1 << place for place in missed))
        if self._is_coordinator:
            self._tell_all(message)
        else:
            self._line.tell(self.view.coordinator, message)

    def _refuse(self, error: PayloadError) -> NoReturn:
        """Go on without the member whose piece cannot be read."""
        assert error.peer is not None
        member = self.view.ids[error.peer]
        if member == self.view.coordinator:
            raise PayloadError(f"[worker {self.id}] {error}") from error
        unreadable = Unreadable(member, error)
        if self._is_coordinator:
            self._propose({member: str(unreadable)})
        about = pack(MemberKind.UNREADABLE, self.view.number, self.step, error.peer, text=str(unreadable))
        self._line.tell(self.view.coordinator, about)
        self._until(lambda: False)
        raise AssertionError

    # vectors that the coordinator collects

    def _contribute(self, wire: Collected, samples: int, occasion: Occasion) -> Mean:
        """A member's part of a step."""
        offer = pack(MemberKind.GRADIENT, self.view.number, self.step, samples, body=wire.offer(samples, occasion))
        self._line.tell(self.view.coordinator, offer)
        while True:
            answer = self._hear(2 * self._limit_s)
            if answer.kind is MemberKind.MEAN and answer.step == self.step:
                return self._mean(wire, answer)

    def _mean(self, wire: Collected, message: MemberMessage) -> Mean:
        try:
            values = wire.read(message.body)
        except PayloadError as error:
            what = f"the mean of step {message.step} from worker {message.sender}"
            raise PayloadError(f"[worker {self.id}] {what} cannot be read: {error}") from None
        return Mean(values, tuple(place for place in range(len(self.view.ids)) if message.detail >> place & 1))

    def _collect(self, wire: Collected, samples: int, occasion: Occasion) -> Mean:
        """The coordinator's part of a step."""
        needed = max(1, len(self.view.ids) - self.options.drop_slowest)
        own, limit_s = {self.id: Offer(self.id, samples, None)}, self._limit_s
        offers = collect(
            self.view.ids,
            needed,
            lambda: self._line.offers_for(self.step) | own,
            lambda missing: self._wait_for(missing, limit_s),
        )
        included = [self.view.ids.index(offer.member) for offer in offers]
        try:
            body, values = wire.combine(offers, occasion, len(self._others))
        except Unreadable as error:
            self._propose({error.member: str(error)})
        if body is not None:
            places = sum(1 << place for place in included)
            self._tell_all(pack(MemberKind.MEAN, self.view.number, self.step, places, body=body))
        return Mean(values, tuple(included))

    # the end of a step

    def commit(self) -> bool:
        """The mean has been applied here; the coordinator waits until somebody else has it too.

        Returns whether two workers hold the step, or there is only one. If not, settle: it stands unless Fenced.
        """
        self.step, self.at_stake = self.step + 1, 0
        now, limit_s = time.monotonic(), self._limit_s
        if not self._fresh:
            self.deadline.observe(now - self._committed_at)
        self._committed_at, self._fresh, self._cut_off = now, False, CutOffCheck()
        self._new.clear()
        if not self._is_coordinator:
            self._line.tell(self.view.coordinator, pack(MemberKind.HELD, self.view.number, self.step))
            return True
        try:
            holding = self._line.holding
            self._wait_for(lambda: [] if self.step in holding.values() else self._others, limit_s)
            return True
        except NewView as news:
            self._pending = news.view
            return False

    # the end

    def finish(self) -> bool:
        """Wait until everyone has made the last step; False when the view changes: settle, and finish again."""
        self._ending = True
        try:
            if self._is_coordinator:
                self._end()
            else:
                self._line.tell(self.view.coordinator, pack(MemberKind.FINISH, self.view.number, self.step))
                while self._hear(2 * self.deadline.seconds).kind is not MemberKind.DONE:
                    pass
            return True
        except NewView as news:
            self._pending = news.view
            return False

    def _end(self) -> None:
        self._wait_for(lambda: [m for m in self._others if m not in self._line.finishing], self._limit_s)
        self.meeting.finish(self.step)
        self._tell_all(pack(MemberKind.DONE, self.view.number, self.step))
