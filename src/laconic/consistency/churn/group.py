"""Who trains together, and how their gradients become one: views, failover, and a step that all or none have made.

Callers: `job.py`. All runs on the worker's own thread; ZeroMQ's threads only move bytes and answer heartbeats.

A view is a numbered list of members; its first member is the coordinator. A step of a view: members send their
gradients to the coordinator, which sums them in the members' order and sends all the same mean. Members say that they
hold it; the coordinator goes on once one does, so that an update that anybody has seen is on two workers.

When somebody joins, leaves or is lost, the first living member publishes the next view (`meeting.py`: only one can). In
the new view members report how many steps they have applied; the most advanced is right, everyone behind it gets its
state, and the step under way is done again if nobody had made it. Whatever is said in an older view is ignored.

Invariant: members of one view that have applied as many steps hold the same bits.
"""

from __future__ import annotations

import time
from typing import NoReturn

import torch
from torch import Tensor

from laconic.consistency.churn.deadline import Deadline
from laconic.consistency.churn.joining import Fenced, found, join
from laconic.consistency.churn.line import Line, NewView
from laconic.consistency.churn.mean import Mean, weighted_mean
from laconic.consistency.churn.meeting import Meeting, View, event
from laconic.consistency.churn.messages import Kind, Message, address, blank, pack, values_of
from laconic.consistency.churn.replica import Replica
from laconic.errors import PayloadError, PeerLost

NO_MODEL = -1
TICK_S = 0.02
MAX_MEMBERS = 64  # bits of a message's `detail`
CUT = "its connection broke"
SILENT = "nothing came from it for {:.3g} s"


class Group:
    """One worker's membership.

    Args:
        drop_slowest: how many members a step does not wait for.
        workers: how many members the first step waits for.
        silence_s: after so long without a heartbeat a connection counts as broken.

    Attributes:
        step: steps applied to the replica so far; NO_MODEL before the first state has come.
        view: the present one.
    """

    def __init__(
        self,
        meeting: Meeting,
        replica: Replica,
        deadline: Deadline,
        *,
        drop_slowest: int = 0,
        workers: int = 1,
        silence_s: float = 1.5,
    ) -> None:
        self.meeting, self.replica, self.deadline = meeting, replica, deadline
        self._drop_slowest, self._workers, self._silence_s = drop_slowest, workers, silence_s
        self._job = replica.signature
        self.begin()

    # coming and going

    def begin(self) -> None:
        """Come in as a newcomer, under a number of its own; blocks until a view holds this worker."""
        self.step = NO_MODEL
        self._line = Line(self.meeting, self._silence_s)
        self._pending: View | None = None
        self._held = self._fresh = self._transferred = self._stepping = False
        self._committed_at = time.monotonic()
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

    def rejoin(self) -> None:
        """Come back as a newcomer after Fenced, and leave a record of it."""
        old, made = self.id, self.step
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

    def _enter(self, view: View) -> None:
        if self.id not in view.ids:
            raise Fenced
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
                self._replace([m for m in self.view.ids if m not in reports], since, self.deadline.seconds)
            elif message.kind is Kind.REPORT:
                reports[message.sender] = message.step
        newest = max(reports.values())
        if newest == NO_MODEL:
            raise self._model_lost()
        if self.step < newest:
            self._catch_up(next(member for member in reports if reports[member] == newest))
        behind = [member for member in self._others if reports[member] < newest]
        self._held = self.step == 0 and len(self.view.ids) < self._workers
        self._transferred, self._line.receiving = bool(behind), set(behind)
        places = sum(1 << self.view.ids.index(member) for member in behind)
        self._tell_all(pack(Kind.START, self.view.number, newest, places, not self._held))
        if behind:
            state = pack(Kind.STATE, self.view.number, newest, body=self.replica.save())
            for member in behind:
                self._line.tell(member, state)

    def _catch_up(self, holder: int) -> None:
        """Fetch the state of a member that is further on."""
        self._line.tell(holder, pack(Kind.FETCH, self.view.number, self.step))
        while True:
            message = self._line.next(TICK_S)
            if message is None:
                self._replace([holder], time.monotonic(), None)
            elif message.kind is Kind.STATE and message.sender == holder:
                return self._take(message)

    def _report(self) -> None:
        """A member's part: say how far it is; give or take the state."""
        self._line.tell(self.view.coordinator, pack(Kind.REPORT, self.view.number, self.step))
        waits: float | None = 2 * self.deadline.seconds
        while True:
            message = self._hear(waits if self.step != NO_MODEL else None)
            if message.kind is Kind.FETCH:
                body = self.replica.save()
                self._line.tell(self.view.coordinator, pack(Kind.STATE, self.view.number, self.step, body=body))
            elif message.kind is Kind.START:
                self._held, self._transferred = not message.flag, bool(message.detail)
                if message.step == self.step:
                    return
                waits = None  # the state takes as long as it takes; a broken connection is noticed
            elif message.kind is Kind.STATE:
                self._take(message)
                return self._tell_all(pack(Kind.HELD, self.view.number, self.step))

    def _take(self, message: Message) -> None:
        self.replica.load(message.body)
        self.step = message.step

    def _hear(self, waits_s: float | None) -> Message:
        """The next message from the coordinator; when that is lost, the next in line takes over.

        Args:
            waits_s: how long it may be silent; None: as long as its connection stands.
        """
        since, watched = time.monotonic(), self.view.coordinator
        suspects: dict[int, str] = {}
        while True:
            message = self._line.next(TICK_S)
            if message is not None and message.sender == self.view.coordinator:
                return message
            if message is not None:
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

    def _look_around(self) -> None:
        """The coordinator, between steps: change the view when somebody has come or gone; wait for enough to begin."""
        while True:
            while self._line.next(0.0) is not None:
                pass
            self._replace(self._others, 0.0, None)
            if self._line.has_newcomers() and len(self.view.ids) < MAX_MEMBERS:
                self._propose({})
            if not self._held:
                return
            self._line.next(TICK_S)

    @property
    def _others(self) -> list[int]:
        return [member for member in self.view.ids if member != self.id]

    def _replace(self, missing: list[int], since: float, limit_s: float | None) -> None:
        """The coordinator: go on without those of the `missing` who cannot be reached, or are silent for `limit_s`."""
        gone = {m: CUT for m in missing if not self._line.reaches(m)}
        if limit_s is not None and self._line.waited_s(since) > limit_s:
            gone = {m: SILENT.format(limit_s) for m in missing} | gone
        if gone:
            self._propose(gone)

    def _propose(self, lost: dict[int, str]) -> NoReturn:
        """Publish the next view, without the lost and with the newcomers; raises NewView with whichever is valid."""
        raise NewView(self._line.propose(lost, max(0, self.step), int(self._stepping), MAX_MEMBERS))

    def _model_lost(self) -> PeerLost:
        return PeerLost(f"[worker {self.id}] everyone who had the model is gone", rank=self.id)

    # steps

    @property
    def place(self) -> int:
        """This worker's place among the members of the view."""
        return self.view.ids.index(self.id)

    def agree(self, gradient: Tensor, samples: int) -> Mean | None:
        """The mean of all members' gradients at this step, or None when the view changes: do the step again.

        Args:
            gradient: a message from `gradient_buffer`, filled.
            samples: how many samples it is the mean over; 0: it counts for nothing.
        """
        self._stepping = True
        try:
            return self._collect(gradient, samples) if self._is_coordinator else self._contribute(gradient, samples)
        except NewView as news:
            self._pending = news.view
            return None
        finally:
            self._stepping = False

    def gradient_buffer(self) -> Tensor:
        """Memory for a gradient that is sent without a copy; its values are `messages.values_of` it."""
        return blank(4 * self.replica.numel)

    def missed(self) -> Mean | None:
        """The mean of the present step if the others have made it without this worker; nothing is waited for."""
        try:
            while self._drop_slowest and not self._is_coordinator and (message := self._line.next(0.0)) is not None:
                if message.kind is Kind.MEAN and message.step == self.step:
                    return self._mean(message)
        except NewView as news:
            self._pending = news.view
        return None

    def _contribute(self, gradient: Tensor, samples: int) -> Mean:
        """A member's part of a step."""
        address(gradient, Kind.GRADIENT, self.view.number, self.step, samples)
        self._line.tell(self.view.coordinator, gradient)
        while True:
            message = self._hear(2 * self._limit_s)
            if message.kind is Kind.MEAN and message.step == self.step:
                return self._mean(message)

    def _mean(self, message: Message) -> Mean:
        values = message.body.view(torch.float32)
        if values.numel() != self.replica.numel:
            raise PayloadError(f"a mean of {values.numel()} values for {self.replica.numel} parameters")
        return Mean(values, tuple(place for place in range(len(self.view.ids)) if message.detail >> place & 1))

    @property
    def _limit_s(self) -> float:
        """How long a step may take; a newcomer's first is not judged by the others' past steps."""
        first = self._fresh and self._transferred
        return max(self.deadline.seconds, self.deadline.patience_s) if first else self.deadline.seconds

    def _collect(self, gradient: Tensor, samples: int) -> Mean:
        """The coordinator's part of a step."""
        needed = max(1, len(self.view.ids) - self._drop_slowest)
        since, limit_s = time.monotonic(), self._limit_s
        while True:
            came = self._line.gradients_of(self.step, self.replica.numel)
            came[self.id] = (samples, values_of(gradient))
            if len(came) >= needed and any(count for count, _ in came.values()):
                break
            if self._line.next(TICK_S) is None:
                self._replace([m for m in self.view.ids if m not in came], since, limit_s)
        included = [place for place, member in enumerate(self.view.ids) if member in came]
        message = self.gradient_buffer()
        weighted_mean([came[self.view.ids[place]] for place in included], values_of(message))
        address(message, Kind.MEAN, self.view.number, self.step, sum(1 << place for place in included))
        self._tell_all(message)
        return Mean(values_of(message).clone(), tuple(included))  # a copy: the message is on its way

    def commit(self) -> bool:
        """The mean has been applied here; the coordinator waits until somebody else has it too.

        Returns:
            Whether two workers hold the step, or there is only one. If not, settle: it stands unless Fenced.
        """
        self.step += 1
        now, limit_s = time.monotonic(), self._limit_s
        if not self._fresh:
            self.deadline.observe(now - self._committed_at)
        self._committed_at, self._fresh = now, False
        if not self._is_coordinator:
            self._line.tell(self.view.coordinator, pack(Kind.HELD, self.view.number, self.step))
            return True
        try:
            self._await_holder(limit_s)
            return True
        except NewView as news:
            self._pending = news.view
            return False

    def _await_holder(self, limit_s: float) -> None:
        """Until somebody else holds the step too."""
        since = time.monotonic()
        while self._others:
            message = self._line.next(TICK_S)
            if message is None:
                self._replace(self._others, since, limit_s)
            elif message.kind is Kind.HELD and message.step == self.step:
                return

    # the end

    def finish(self) -> bool:
        """Wait until everyone has made the last step; False when the view changes: settle, and finish again."""
        try:
            if self._is_coordinator:
                self._end()
            else:
                self._line.tell(self.view.coordinator, pack(Kind.FINISH, self.view.number, self.step))
                while self._hear(2 * self.deadline.seconds).kind is not Kind.DONE:
                    pass
            return True
        except NewView as news:
            self._pending = news.view
            return False

    def _end(self) -> None:
        since = time.monotonic()
        while waiting := [m for m in self._others if m not in self._line.finishing]:
            if self._line.next(TICK_S) is None:
                self._replace(waiting, since, self._limit_s)
        self.meeting.finish(self.step)
        self._tell_all(pack(Kind.DONE, self.view.number, self.step))

    def say_busy(self, busy: bool) -> None:
        """Tell all members that no step comes from here for a while, or that it does again."""
        self._tell_all(pack(Kind.BUSY, self.view.number, self.step, flag=busy))

    def _tell_all(self, message: Tensor) -> None:
        for member in self._others:
            self._line.tell(member, message)
