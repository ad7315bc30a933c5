"""P ranks as P threads of one process: for tests and for trying things out.

Sends are rendezvous: a send ends only when its receiver has taken the data, so a schedule that could deadlock on the
strictest engine does so here, and the time-out shows it.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from torch import Tensor

from laconic.errors import BadInput, CollectiveTimeout, Mismatch, PeerLost
from laconic.transports.base import DEFAULT_TIMEOUT_S, Arena, Call, Incoming, Outgoing, Posted, Transport, members_of

T = TypeVar("T")


@dataclass(eq=False)
class _Letter:
    """A slice on its way, and whether its receiver has taken it."""

    data: Tensor
    call: Call
    taken: bool = False


class Hub:
    """Shared by the ranks of a thread world: a mailbox for every ordered pair, and the ranks that have left.

    Attributes:
        blames: by rank, the peer it has given up on; shared by all parts of a job, with job-wide numbers.
    """

    def __init__(self, world_size: int, blames: dict[int, int] | None = None) -> None:
        self.world_size = world_size
        self.changed = threading.Condition()
        self.boxes: dict[tuple[int, int], deque[_Letter]] = {}
        self.gone: set[int] = set()
        self.blames: dict[int, int] = {} if blames is None else blames
        self._parts: dict[tuple[int, int], Hub] = {}

    def culprit(self, rank: int) -> int:
        """The rank whose loss made this rank leave: itself, or the peer it waited for in vain."""
        passed = {rank}
        while (other := self.blames.get(rank, rank)) not in passed:
            passed.add(rank := other)
        return rank

    def part(self, split: int, colour: int, world_size: int) -> Hub:
        """The hub that the ranks of one colour share after a split, made by the first that asks."""
        with self.changed:
            return self._parts.setdefault((split, colour), Hub(world_size, self.blames))


class ThreadTransport(Transport):
    """One rank of a thread world."""

    engine = "threads"

    def __init__(self, hub: Hub, rank: int, timeout_s: float = DEFAULT_TIMEOUT_S) -> None:
        super().__init__(rank, hub.world_size, timeout_s)
        self.hub = hub
        self.arena = Arena()

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        if recvs:
            self.arena.recycle()
        letters = []
        with self.hub.changed:
            for send in sends:
                letter = _Letter(send.data, call)
                self.hub.boxes.setdefault((self.rank, send.peer), deque()).append(letter)
                letters.append((send.peer, letter))
            self.hub.changed.notify_all()
        return _ThreadRound(self, call, letters, recvs, round)

    def split(self, colours: Sequence[int]) -> Transport:
        self._splits += 1
        members = members_of(colours, self.rank)
        hub = self.hub.part(self._splits, colours[self.rank], len(members))
        part = ThreadTransport(hub, members.index(self.rank), self.timeout_s)
        self.adopt(part, members)
        return part

    def close(self) -> None:
        with self.hub.changed:
            if (cause := self.whole.cause) is not None and cause.peer is not None:
                self.hub.blames.setdefault(self.named(self.rank), cause.peer)
            self.hub.gone.add(self.rank)
            self.hub.changed.notify_all()

    def wait_for(self, ready: Callable[[], bool], peer: int, call: Call, round: int) -> None:
        """Wait, holding the hub, until `ready`; PeerLost when the peer has left, CollectiveTimeout in the end."""
        deadline = time.monotonic() + self.timeout_s
        while not ready():
            if peer in self.hub.gone:
                left = self.named(peer)
                culprit = self.hub.blames[self.named(self.rank)] = self.hub.culprit(left)
                text = f"peer {left} has left" if culprit == left else f"peer {culprit} was lost, as rank {left} found"
                raise self.failure(PeerLost, text, culprit, round, call)
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                late = self.hub.blames[self.named(self.rank)] = self.named(peer)
                text = f"nothing from or for peer {late} in {self.timeout_s:g} s"
                raise self.failure(CollectiveTimeout, text, late, round, call)
            self.hub.changed.wait(left_s)


@dataclass(eq=False)
class _ThreadRound(Posted):
    owner: ThreadTransport
    call: Call
    letters: list[tuple[int, _Letter]]
    recvs: Sequence[Incoming]
    round: int

    def received(self, index: int) -> Tensor:
        owner, call, incoming = self.owner, self.call, self.recvs[index]
        box_key = (incoming.peer, owner.rank)
        with owner.hub.changed:
            owner.wait_for(lambda: bool(owner.hub.boxes.get(box_key)), incoming.peer, call, self.round)
            letter = owner.hub.boxes[box_key].popleft()
            if letter.call.code != call.code:
                peer = owner.named(incoming.peer)
                text = f"peer {peer} is in {letter.call.signature}, this rank in {call.signature}"
                raise owner.failure(Mismatch, text, peer, self.round, call)
            target = owner.arena.take(incoming) if incoming.into is None else incoming.into
            if incoming.at_most:
                target = target[: letter.data.numel()]
            target.copy_(letter.data)
            letter.taken = True
            owner.hub.changed.notify_all()
        return target

    def sent(self) -> None:
        with self.owner.hub.changed:
            for peer, letter in self.letters:
                self.owner.wait_for(lambda letter=letter: letter.taken, peer, self.call, self.round)  # type: ignore[misc]


def run_threads(world_size: int, work: Callable[[Transport], T], timeout_s: float = 30.0) -> list[T]:
    """Run `work(transport)` on every rank of a thread world and return the results by rank.

    Raises the first rank's error when any fails; the others are told that it has left.

    >>> run_threads(2, lambda transport: transport.rank)
    [0, 1]
    """
    if world_size < 1 or not callable(work):
        raise BadInput(f"run_threads needs 1 rank or more and a function of a transport, got {world_size}, {work!r}")
    hub = Hub(world_size)
    results: dict[int, T] = {}
    errors: list[BaseException] = []

    def body(rank: int) -> None:
        transport = ThreadTransport(hub, rank, timeout_s)
        try:
            results[rank] = work(transport)
        except BaseException as error:  # handed to the caller below
            errors.append(error)
            transport.close()

    workers = [threading.Thread(target=body, args=(rank,), daemon=True) for rank in range(world_size)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    if errors:
        raise errors[0]
    return [results[rank] for rank in range(world_size)]
