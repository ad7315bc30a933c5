"""A member's line to the others: its number, its connections, and the messages of the present view only.

Caller: `group.py`. It drops messages of older views, ends every wait with NewView when a newer view appears, and notes
newcomers that ask to join.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Collection, Mapping
from typing import NamedTuple

from laconic.consistency.elastic.credentials import own_credentials, shared_key
from laconic.consistency.elastic.meeting import Meeting, View, event
from laconic.consistency.elastic.messages import MAX_MEMBERS, NO_MODEL, MemberKind, MemberMessage, pack, unpack
from laconic.consistency.elastic.places.base import split_port
from laconic.consistency.elastic.places.server import meeting_secret
from laconic.consistency.elastic.progress import ExchangeProgress
from laconic.consistency.elastic.vectors import Offer
from laconic.consistency.worker_mesh import receive
from laconic.errors import PayloadError, PeerLost
from laconic.transports.frame import Frame
from laconic.transports.liveness import LostPeer
from laconic.transports.relay import RelayedPort
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_address import Address
from laconic.transports.zeromq_mesh import Patience

# How often a wait looks at the meeting place: messages tell of new views, the place is for those that nobody told.
LOOK_S = 0.1
HEARTBEAT_S = 0.25
RELAY_VARIABLE = "LACONIC_RELAY"
LINGER_S = 0.5
MAX_WISHES = 1024  # of newcomers, unanswered
LOADING_S = 10.0  # a newcomer that was not heard for so long does not load the state any more
# A connection that is not there after so long is begun anew: on a dead link the kernel tries at ever longer intervals.
RECONNECT_S = 4.0


class NewView(Exception):
    """A newer view is valid."""

    def __init__(self, view: View) -> None:
        super().__init__(view.number)
        self.view = view


class Newcomer(NamedTuple):
    """A worker that has asked to join."""

    address: str
    step: int  # it has caught up with so many; NO_MODEL: it gets the state when it has joined


class Line:
    """One worker's ZeroMQ transport in a group."""

    def __init__(self, meeting: Meeting, number: int, silence_s: float, connections: int = 1) -> None:
        self.meeting, self.id, self.connections = meeting, number, connections
        self.view = View(0, (), "", 0.0)
        self.newcomers: dict[int, Newcomer] = {}  # by number
        self.wishes: deque[MemberMessage] = deque(maxlen=MAX_WISHES)  # of newcomers that load; see `handover.py`
        self.handed: deque[MemberMessage] = deque()  # what members have answered
        self._loading: dict[int, float] = {}  # newcomers that load the state, and when they were last heard
        self.keeps_at = NO_MODEL  # the step after which members keep the state for newcomers
        self.busy: set[int] = set()  # who has said so, in this view or before
        self.receiving: set[int] = set()  # members that a state is on its way to
        self.finishing: set[int] = set()  # members that have made their last step
        self.progress = ExchangeProgress(self.view)
        self.ignored = 0  # messages of other views, of strangers and of no known kind
        self._leaving: set[int] = set()
        self.holding: dict[int, int] = {}  # how many steps a member has said to hold
        self._excused_at = 0.0  # when the last of `busy` or `receiving` was over
        self._gradients: dict[int, MemberMessage] = {}
        self._met: dict[int, float] = {}  # since when we have had, or tried to have, a connection to a member
        self._silence_s = silence_s
        self._is_closed, self._tried_at = False, 0.0
        self._looked_at = time.monotonic()
        host, own = os.environ.get("LACONIC_BIND", "127.0.0.1"), own_credentials(meeting, number)
        key = shared_key(meeting, own, host)
        patience = Patience(HEARTBEAT_S, silence_s, LINGER_S)
        self.transport = ZmqTransport(
            None, self.id, 1, 60.0, bind=host, key=own or key, patience=patience, connections=connections
        )
        self._relayed = self._ask_relay(key, host)
        self.address = self.transport.address

    def is_revoked(self, member: int) -> bool:
        """Whether a member of the view was taken off the job's list."""
        if self.meeting.admitted() is None:
            return False
        address = dict(self.view.members).get(member)
        return address is not None and not self._admits(address)

    def _is_member(self, sender: int) -> bool:
        return sender in self.view.ids and not self.is_revoked(sender)

    def _admits(self, address: str) -> bool:
        try:
            return self.meeting.admits(Address.parse(address).token.hex())
        except PayloadError:
            return False

    def _ask_relay(self, key: bytes | None, host: str) -> RelayedPort | None:
        """Return this worker's address at the relay that LACONIC_RELAY names; None if there is none."""
        named = os.environ.get(RELAY_VARIABLE)
        if not named:
            return None
        try:
            relay = split_port(named.removeprefix("tcp://"), None, named)
            held = RelayedPort(relay, meeting_secret(key, relay[0]).key, self.id, self.transport.listens_at)
        except BaseException:
            self.transport.close()
            raise
        self.transport.advertise(relay[0], held.port)
        return held

    def close(self) -> None:
        """Say goodbye and give up all connections; safe to call twice."""
        if self._is_closed:
            return
        self._is_closed = True
        for member in self.view.ids:
            if member != self.id:
                self.tell(member, pack(MemberKind.LEAVE, self.view.number, 0))
        self.transport.close()
        if self._relayed is not None:
            self._relayed.close()

    # joining

    def meets(self, view: View) -> bool:
        """Connect to all members of a view; return whether they are met.

        Members exchange with each other, so a worker that reaches only some of them could not take part.
        """
        again = time.monotonic() - self._tried_at > RECONNECT_S
        for member, address in view.members:
            if member not in self.transport.peers or (again and not self.transport.is_connected(member)):
                self.transport.add_peer(member, address)
                self._tried_at = time.monotonic()
            elif again:  # it may have forgotten this worker in a change of views, and its goodbye been lost
                self.transport.mesh.greet(self.transport.mesh.peers[member])
                self._tried_at = time.monotonic()
        met = (self.transport.mesh.peers[member] for member in view.ids)
        return all(peer.established and peer.greeted for peer in met)

    def no_way(self, view: View) -> str:
        """Say which members this worker has not met, and what to do about it, as a part of a sentence."""
        peers = self.transport.mesh.peers
        met = {member for member, peer in peers.items() if peer.established and peer.greeted}
        missing = [f"worker {m} at {Address.parse(address).host}" for m, address in view.members if m not in met]
        own, cure = self.transport.mesh.address.host, "behind a router, name a relay by `laconic join --relay`"
        text = f"{', '.join(missing)} and this worker at {own} have not reached each other"
        return f"{text}; LACONIC_BIND is the address at which others reach a worker, and {cure}"

    def ask(self, view: View, step: int = NO_MODEL) -> bool:
        """Ask the coordinator of a view to admit this worker to the next; return whether the request was sent.

        Args:
            step: what this worker has caught up with.
        """
        if not self.meets(view):
            return False
        self.tell(view.coordinator, pack(MemberKind.JOIN, view.number, step, text=self.address))
        return True

    def invitation(self, wait_s: float) -> View | None:
        """A view with this worker in it, if one is announced within `wait_s`."""
        try:
            self.next(wait_s, look=False)
        except NewView as news:
            if self.id in news.view.ids:
                return news.view
        return None

    # views

    def turn_to(self, view: View) -> None:
        """Receive only messages of this view from now on; connect to its members, and drop all others."""
        waiting = {m: each for m, each in self.newcomers.items() if m not in view.ids and self.reaches(m)}
        if view.coordinator != self.id:
            waiting = {}  # they will ask its coordinator
        now = time.monotonic()
        self._loading = {m: at for m, at in self._loading.items() if now - at < LOADING_S and m not in view.ids}
        for member in {*self.view.ids, *self.transport.mesh.peers} - {*view.ids, *waiting, *self._loading, self.id}:
            self._forget(member)
        # Whoever has caught up asks again: it may have done so with a coordinator whose last step is lost.
        self.view, self.newcomers = view, {m: each for m, each in waiting.items() if each.step == NO_MODEL}
        for member, address in view.members:
            # Whoever was met before and cannot be reached is lost: a new connection would only hide that.
            if member != self.id and member not in self._met and member not in self.transport.peers:
                self.transport.add_peer(member, address)
            self._met.setdefault(member, time.monotonic())
        for known in (self.receiving, self.finishing, self._leaving, self.holding, self._gradients):
            known.clear()
        self.handed.clear()
        self.progress = ExchangeProgress(view)
        self.busy &= set(view.ids)  # an evaluation goes on whoever comes or goes

    @property
    def is_loaded_from(self) -> bool:
        """Whether a newcomer outside the view loads the state."""
        return any(time.monotonic() - at < LOADING_S for m, at in self._loading.items() if m not in self.view.ids)

    def reached_newcomers(self) -> dict[int, Newcomer]:
        """The newcomers that have asked to join; those out of reach are dropped."""
        for member in [m for m in self.newcomers if not self.reaches(m)]:
            del self.newcomers[member]
            self._forget(member)
        return self.newcomers

    def _forget(self, member: int) -> None:
        self.transport.drop_peer(member)
        self._met.pop(member, None)

    def propose(self, lost: Mapping[int, LostPeer], step: int, redo: int, admitted: Collection[int]) -> View:
        """Publish the next view, without the `lost` and with the `admitted`; return the view that is then valid.

        At most `redo` of the `step` steps made so far may have to be repeated.
        """
        staying = [(member, place) for member, place in self.view.members if member not in lost]
        coming = [(m, self.newcomers[m].address) for m in self.newcomers if m in admitted and self.reaches(m)]
        coming = coming[: MAX_MEMBERS - len(staying)]
        changes = {m: "left" if m in self._leaving else f"lost: {loss.why}" for m, loss in lost.items()}
        changes |= {m: "joined" for m, _ in coming}
        why = "; ".join(f"worker {member} {what}" for member, what in changes.items())
        view = View(self.view.number + 1, (*staying, *coming), self.view.job, self.view.begun, why)
        if not self.meeting.publish(view):
            newest = self.meeting.newest(self.view.number)
            assert newest is not None
            return newest
        announcement = pack(MemberKind.VIEW, view.number, step, text=view.to_json())
        for member in view.ids[1:]:
            self.tell(member, announcement)
        self.meeting.record([event(view, step, m, what, redo if m in lost else 0) for m, what in changes.items()])
        return view

    # messages

    def reaches(self, member: int) -> bool:
        """Whether a member may be there: its connection stands, or has been in the making for less than silence_s."""
        if self.is_revoked(member):
            return False
        if self.transport.is_connected(member):
            return True
        since = self._met.setdefault(member, time.monotonic())
        return member in self.transport.peers and time.monotonic() - since < self._silence_s

    def waited_s(self, since: float) -> float:
        """How long a wait has lasted since `since`, or since the last member was busy or receiving a state."""
        if self.receiving or not self.busy.isdisjoint(self.view.ids):
            return 0.0
        return time.monotonic() - max(since, self._excused_at)

    def has_reached(self, member: int) -> bool:
        """Whether its connection stands."""
        return self.transport.is_connected(member)

    @property
    def is_relayed(self) -> bool:
        """Whether others reach this worker through a relay."""
        return self._relayed is not None

    @property
    def sent_nbytes(self) -> int:
        """Payload bytes sent so far."""
        return self.transport.counters.total_sent_nbytes

    def tell(self, member: int, message: Frame) -> None:
        """Send; a member that is gone is noticed by `reaches`."""
        with contextlib.suppress(PeerLost):
            self.transport.send_to(member, message)

    def next(self, wait_s: float, *, look: bool = True) -> MemberMessage | None:
        """The next message of the present view, None when none came within `wait_s`; NewView when that is over."""
        deadline = time.monotonic() + wait_s
        while True:
            message = self._receive(max(0.0, deadline - time.monotonic()))
            if message is None:
                if look and time.monotonic() - self._looked_at > LOOK_S:
                    self.look()
                if time.monotonic() >= deadline:
                    return None
            elif message.kind is MemberKind.JOIN:
                if message.sender not in self.view.ids:  # else it asked again before it knew
                    self.newcomers[message.sender] = Newcomer(message.text, message.step)
            elif message.kind in (MemberKind.WANT, MemberKind.PULL):
                self.wishes.append(message)
                self._loading[message.sender] = time.monotonic()
            elif message.kind in (MemberKind.OFFERED, MemberKind.CHUNK) or (
                message.kind is MemberKind.REPEAT and not message.view
            ):
                self.handed.append(message)
                return None  # for a newcomer, which waits for it
            elif message.kind is MemberKind.VIEW:
                self._announced(message)
            elif message.kind is MemberKind.BUSY:
                self._excuse(self.busy, message.sender, bool(message.flag))
            elif message.view != self.view.number or not self._is_member(message.sender):
                self.ignored += 1
            else:
                self._note(message)
                return message

    def offers_for(self, step: int) -> dict[int, Offer]:
        """What members have offered for a step so far."""
        return {
            member: Offer(member, message.detail, message.body)
            for member, message in self._gradients.items()
            if message.step == step
        }

    def _note(self, message: MemberMessage) -> None:
        """Store a message that may be needed after the present wait."""
        self.progress.note(message)
        if message.kind is MemberKind.START:
            getting = {m for place, m in enumerate(self.view.ids) if message.detail >> place & 1}
            self.receiving = getting - self.holding.keys() - {self.id}
        elif message.kind is MemberKind.HELD:
            self.holding[message.sender] = message.step
            self._excuse(self.receiving, message.sender, False)
        elif message.kind is MemberKind.KEEP:
            self.keeps_at = message.step
        elif message.kind is MemberKind.FINISH:
            self.finishing.add(message.sender)
        elif message.kind is MemberKind.LEAVE:
            self._leaving.add(message.sender)
        elif message.kind is MemberKind.GRADIENT:
            self._gradients[message.sender] = message

    def _excuse(self, excused: set[int], member: int, begins: bool) -> None:
        if begins:
            excused.add(member)
        elif member in excused:
            excused.remove(member)
            self._excused_at = time.monotonic()

    def _announced(self, message: MemberMessage) -> None:
        try:
            view = View.parse(message.text)
        except PayloadError:
            self.ignored += 1
            return
        if view.number > self.view.number:
            raise NewView(view)

    def look(self, *, fresh: bool = False) -> None:
        """Look for a newer view at the meeting place; NewView when there is one that can be read.

        Args:
            fresh: ask the place itself, which may take a while, not what was read there a moment ago.
        """
        self._looked_at = time.monotonic()
        newest, find = None, self.meeting.newest if fresh else self.meeting.seen
        with contextlib.suppress(OSError, PayloadError):  # messages tell of views too
            newest = find(self.view.number)
        if newest is not None:
            raise NewView(newest)

    def _receive(self, wait_s: float) -> MemberMessage | None:
        came = receive(self.transport, wait_s)
        if came is None:
            return None
        try:
            return unpack(*came)
        except PayloadError:
            self.ignored += 1
            return None
