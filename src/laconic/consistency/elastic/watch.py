"""Detect lost members, and publish the next view without them.

Callers: `membership.py` makes one each time a worker joins; `group.py` waits through it. Everything runs on the
worker's own thread; ZeroMQ's threads only move bytes and answer heartbeats.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import NoReturn

from torch import Tensor

from laconic.consistency.elastic.handover import Handover
from laconic.consistency.elastic.line import Line, NewView
from laconic.consistency.elastic.meeting import View
from laconic.consistency.elastic.messages import MAX_MEMBERS, NO_MODEL, MemberKind, MemberMessage, pack
from laconic.consistency.elastic.options import Deadline, ElasticOptions
from laconic.consistency.elastic.outage import RETRY_S, Outage
from laconic.consistency.elastic.reachability import CutOffCheck
from laconic.consistency.elastic.replica import Replica
from laconic.errors import PeerLost, StorageError
from laconic.transports.frame import NOTHING
from laconic.transports.liveness import LossLedger, LostPeer

LOGGER = logging.getLogger("laconic.consistency")
TICK_S = 0.02
REMIND_S = 5.0  # after which a worker says that the first step waits for others
WAITED_STEPS = 3  # a newcomer that is a step behind each time is admitted all the same
CUT = "its connection broke"
REVOKED = "its key was revoked"
SILENT = "nothing came from it for {:.3g} s"


def model_lost(worker: int) -> PeerLost:
    """The error when no living member has the model."""
    return PeerLost(f"[worker {worker}] everyone who had the model is gone", rank=worker)


@dataclass
class Standing:
    """One worker's progress since it joined.

    Attributes:
        step: agreements applied to the replica so far; NO_MODEL before the first state has come.
        at_stake: steps made since the last agreement, which are lost when the view changes.
        begun: a member has been told to train.
        held: the first step waits for more workers.
        fresh: no step was made in this view yet.
        ending: this worker has made its last step.
        new: members that have not made a step with this worker yet.
        parts: into how many shares the step under way is divided, if a newcomer has joined within it; else 0.
        is_first: this worker began the job.
    """

    step: int = NO_MODEL
    at_stake: int = 0
    begun: bool = False
    held: bool = False
    fresh: bool = False
    ending: bool = False
    new: set[int] = field(default_factory=set)
    parts: int = 0
    is_first: bool = False


class MemberWatch:
    """Watches the other members of a view, as Liveness; `period` is the most steps between two agreements."""

    def __init__(self, line: Line, replica: Replica, deadline: Deadline, options: ElasticOptions, period: int) -> None:
        self.line, self.standing, self.handover = line, Standing(), Handover(line, replica)
        self._replica, self._deadline, self._options, self._period = replica, deadline, options, period
        self._cut_off, self._suspects = CutOffCheck(), LossLedger(())
        self._held_at, self._reminded_of = 0.0, 0  # since when the first step is held; of how many members was told
        self._admits_at = 0.0  # newcomers wait until then, for the meeting place refused the view with them in it
        self._asked: dict[int, int] = {}  # newcomers that load the state: our step when they first asked to join

    def enter(self, view: View) -> None:
        """Watch the members of this view from now on."""
        standing, ids = self.standing, set(view.ids)
        standing.new = (standing.new | ids - set(self.view.ids)) & ids
        self.line.turn_to(view)
        self._suspects, self._admits_at = LossLedger(view.ids), 0.0
        self.trust()

    def trust(self) -> None:
        """Clear the suspicion of being cut off, after a new view or a complete step."""
        self._cut_off = CutOffCheck()

    @property
    def id(self) -> int:
        """This worker's number."""
        return self.line.id

    @property
    def view(self) -> View:
        """The present view."""
        return self.line.view

    @property
    def place(self) -> int:
        """This worker's place among the members of the view."""
        return self.view.ids.index(self.id)

    @property
    def here(self) -> list[int]:
        """The members that are not suspected, in their order."""
        return self._suspects.here

    @property
    def lost(self) -> Mapping[int, LostPeer]:
        """The suspected members, which the next view will leave out."""
        return self._suspects.lost

    @property
    def is_coordinator(self) -> bool:
        """Whether this worker commits the steps."""
        return self.view.coordinator == self.id

    @property
    def others(self) -> list[int]:
        """All members but this one."""
        return [member for member in self.view.ids if member != self.id]

    @property
    def steps(self) -> int:
        """Steps committed so far: more than `standing.step` where members agree on blocks of steps."""
        return int(self._replica.extra.get("steps", self.standing.step))

    @property
    def limit_s(self) -> float:
        """How long a step may take; a newcomer's first is not judged by the others' past steps."""
        seconds = self._deadline.seconds
        return max(seconds, self._deadline.patience_s) if self.standing.new else seconds

    # what members say

    def say(
        self,
        kind: MemberKind,
        detail: int = 0,
        flag: int = 0,
        *,
        to: Iterable[int] | None = None,
        body: Tensor = NOTHING,
        text: str = "",
    ) -> None:
        """Send a message about the present step: to the coordinator (from the coordinator: to all), or to `to`."""
        if to is None:
            to = self.others if self.is_coordinator else [self.view.coordinator]
        message = pack(kind, self.view.number, self.standing.step, detail, flag, body=body, text=text)
        for member in to:
            self.line.tell(member, message)

    def say_busy(self, busy: bool) -> None:
        """Tell all members that this worker makes no steps for a while, or makes them again."""
        self.say(MemberKind.BUSY, flag=busy, to=self.others)

    def bits(self, members: Iterable[int]) -> int:
        """Members as a message's `detail`: a bit for each place."""
        return sum(1 << self.view.ids.index(member) for member in members)

    def hear(self, waits_s: float | None) -> MemberMessage:
        """Wait for the coordinator's next message; if the coordinator is lost, the next member takes over.

        It may be silent for `waits_s`; None: as long as its connection stands.
        """
        return next(message for message in self.heard(waits_s) if message is not None)

    def hear_held(self) -> None:
        """As `hear`, while the first step waits for more workers."""
        for message in self.heard(None):
            self._remind()
            if message is not None:
                return

    def _remind(self) -> None:
        """Log that the first step waits for more workers: after REMIND_S, and again when their number has changed."""
        here, now = len(self.view.ids), time.monotonic()
        self._held_at = self._held_at or now
        if now - self._held_at < REMIND_S or here == self._reminded_of:
            return
        self._reminded_of = here
        wanted = f"{self._options.workers} workers" if self._options.workers > here else "more workers"
        LOGGER.warning("[worker %d] the first step waits for %s: %d so far", self.id, wanted, here)

    def heard(self, waits_s: float | None) -> Iterator[MemberMessage | None]:
        """As `hear`, but also yield pieces of any member, and None after every tick without a message."""
        since, watched = time.monotonic(), self.view.coordinator
        self._suspects = LossLedger(self.view.ids)
        while True:
            message = self.line.next(TICK_S)
            if message is not None:
                if message.sender == self.view.coordinator or message.kind is MemberKind.PIECE:
                    yield message
                continue
            for member in self.others:
                if not self.line.reaches(member):
                    self._suspect(member, REVOKED if self.line.is_revoked(member) else CUT)
            first = self.here[0]
            if first == self.id:
                if not self.hesitates():
                    self.line.look(fresh=True)
                    if self.standing.step == NO_MODEL:
                        raise model_lost(self.id)
                    self.propose(self.lost.values())
                yield None
                continue
            if first != watched:
                since, watched, waits_s = time.monotonic(), first, 2 * self._deadline.seconds
            if waits_s is not None and self.line.waited_s(since) > waits_s:
                self._suspect(watched, SILENT.format(waits_s))
            yield None

    def _suspect(self, member: int, why: str) -> None:
        self._suspects.note(LostPeer(member, self.id, why))

    # what the coordinator does about it

    def look_around(self) -> None:
        """Between steps: change the view if members have joined or gone; wait until there are enough to begin."""
        while True:
            self.look_after()
            self._admit(self._due((NO_MODEL, self.standing.step)) | self._late())
            if not self.standing.held:
                return
            self._remind()
            self.line.next(TICK_S)

    def welcome(self) -> None:
        """Before an exchange: admit newcomers that have caught up, so that nobody waits for them."""
        while self.line.next(0.0) is not None:
            pass
        self._admit(self._due((self.standing.step,)))

    def _due(self, steps: tuple[int, ...]) -> set[int]:
        """Newcomers that are ready at one of these steps."""
        return {member for member, newcomer in self.line.reached_newcomers().items() if newcomer.step in steps}

    def _late(self) -> set[int]:
        """Newcomers that were a step behind too often: they get what they lack when they are in the view."""
        step, waiting = self.standing.step, self.line.newcomers
        self._asked = {m: self._asked.get(m, step) for m, each in waiting.items() if each.step != NO_MODEL}
        return {member for member, since in self._asked.items() if step - since >= WAITED_STEPS}

    def look_after(self) -> None:
        """At any time: receive pending messages, and change the view if a member has gone."""
        while self.line.next(0.0) is not None:
            pass
        self.hand_out()
        self.replace(self.others)

    def hand_out(self) -> None:
        """Between steps: answer newcomers that load the state."""
        if not self.standing.at_stake or self._period > 1:
            self.handover.answer(self.standing.step, begun=self.standing.begun)

    def wait_for(self, missing: Callable[[], list[int]], limit_s: float) -> None:
        """Wait until no member is `missing`; drop members that are gone, or silent for `limit_s`."""
        since = time.monotonic()
        while absent := missing():
            if self.line.next(TICK_S) is None:
                self.replace(absent, since, limit_s)

    def replace(self, missing: list[int], since: float = 0.0, limit_s: float | None = None) -> None:
        """Propose a view without the `missing` members that cannot be reached, or are silent for `limit_s`."""
        self._suspects = LossLedger(self.view.ids)
        silent = limit_s is not None and self.line.waited_s(since) > limit_s
        for member in missing:
            if not self.line.reaches(member):
                self._suspect(member, REVOKED if self.line.is_revoked(member) else CUT)
            elif silent:
                self._suspect(member, SILENT.format(limit_s))
        if self.lost and not self.hesitates():
            self.propose(self.lost.values())

    def hesitates(self) -> bool:
        """Whether to wait for a view from the others, long enough for them to miss this worker's heartbeat."""
        return self._cut_off.suspects(self.view, self.id, 2 * self._options.silence_s + self._deadline.seconds)

    def propose(self, losses: Iterable[LostPeer]) -> NoReturn:
        """Declare members lost: publish the next view, without them; raises NewView with the valid view."""
        lost = {loss.peer: loss for loss in losses}
        for member, loss in lost.items():
            LOGGER.warning("worker %d goes on without worker %d: %s", self.id, member, loss.why)
        standing, made = self.standing, max(0, self.steps)
        redo = self._period if standing.begun and not standing.ending else 0  # others may be further on
        cure = "save it, as with torch.save(model.state_dict(), path), and begin again at another meeting place"
        kept = f"the model after {made} steps is in this worker's memory: {cure}"
        outage = Outage(f"[worker {self.id}] view {self.view.number + 1}", self._options.outage_s, kept)
        try:
            while True:
                try:
                    raise NewView(self.line.propose(lost, made, redo, self._due((NO_MODEL, standing.step))))
                except StorageError as error:
                    if not outage.has_begun:
                        self.say_busy(True)  # so that the others wait for it
                    outage.failed(error)
                self.line.next(RETRY_S)  # another may get it written
        finally:
            if outage.has_begun:
                self.say_busy(False)

    def _admit(self, coming: set[int]) -> None:
        """Admit newcomers by raising NewView; if the view cannot be written, they wait and members go on."""
        if not coming or len(self.view.ids) >= MAX_MEMBERS or time.monotonic() <= self._admits_at:
            return
        try:
            raise NewView(self.line.propose({}, max(0, self.steps), 0, coming))
        except StorageError as error:
            if not self._admits_at:
                warnings.warn(f"newcomers wait, and worker {self.id} trains on: {error}", stacklevel=2)
            self._admits_at = time.monotonic() + RETRY_S
