"""The other members' progress in the exchange of a step, from their messages in the present view.

Callers: `line.py` notes messages, `group.py` waits by it, `view_transport.py` takes the pieces.
"""

from __future__ import annotations

import time
from collections import defaultdict, deque

from torch import Tensor

from laconic.consistency.elastic.meeting import View
from laconic.consistency.elastic.messages import MemberKind, MemberMessage, Paces
from laconic.transports.liveness import LostPeer


class ExchangeProgress:
    """The messages of one view.

    Attributes:
        pieces: of exchanges, by sender, in order: the code and the data.
        ready: the step whose sum a member has, by member.
        committed: the step that is to be applied, −1 before the first.
        paces: nanoseconds a sample, by member, as they said; at members, as the coordinator said.
        unreadable: members whose pieces cannot be read.
    """

    def __init__(self, view: View) -> None:
        self._ids = view.ids
        self.pieces: dict[int, deque[tuple[int, Tensor]]] = defaultdict(deque)
        self.ready: dict[int, int] = {}
        self.committed = -1
        self.paces: dict[int, int] = {}
        self.unreadable: dict[int, LostPeer] = {}
        self._said_at: dict[int, float] = {}
        self._cut: dict[tuple[int, int], float] = {}  # (by whom, who) cannot be reached, since when

    def note(self, message: MemberMessage) -> None:
        """Record a message of this view."""
        sender, now = message.sender, time.monotonic()
        self._said_at[sender] = now
        if message.kind is MemberKind.PIECE:
            self.pieces[sender].append((message.detail, message.body))
        elif message.kind is MemberKind.READY:
            self.ready[sender] = message.step
            self.paces[sender] = message.detail
            self._cut = {pair: at for pair, at in self._cut.items() if pair[0] != sender}
        elif message.kind is MemberKind.COMMIT:
            self.committed, self.paces = message.step, dict(message.read(Paces, ()))
        elif message.kind is MemberKind.GRADIENT:
            self.paces[sender] = message.read(int, 0)
        elif message.kind is MemberKind.UNREADABLE and message.detail < len(self._ids):
            member = self._ids[message.detail]
            self.unreadable[member] = LostPeer(member, sender, message.text)
        elif message.kind is MemberKind.WAITING:
            missed = [m for place, m in enumerate(self._ids) if message.detail >> place & 1]
            others = {pair: at for pair, at in self._cut.items() if pair[0] != sender}
            self._cut = others | {(sender, m): self._cut.get((sender, m), now) for m in missed}

    def said_since(self, member: int, since: float) -> float:
        """When a member was last heard, or `since`."""
        return max(since, self._said_at.get(member, 0.0))

    def apart(self, patience_s: float) -> list[LostPeer]:
        """Of each two members that could not reach each other for that long, the one that joined later."""
        now = time.monotonic()
        pairs = [sorted(pair, key=self._ids.index) for pair, at in self._cut.items() if now - at > patience_s]
        return [LostPeer(late, early, f"worker {early} and it cannot reach each other") for early, late in pairs]
