"""The one driver of rounds: posts a round's messages, pauses, takes what comes in order, and counts.

Callers: `executor.run` for schedules, and every exchange of payloads. No other code waits for the messages of a call.

A round is a generator that pauses once, where it can only wait, so that a thread can keep several exchanges under way:
one is encoded while another is on the wire. Where an engine lets another thread wait, it yields what to wait for.
`finish` runs one without pauses.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterable, Sequence
from itertools import chain
from typing import TypeVar

from torch import Tensor

from laconic.errors import PayloadError
from laconic.transports.base import Call, Incoming, Outgoing, Posted, Timings

T = TypeVar("T")
Pause = Callable[[], None] | None  # waits for what a piece of work waits for
Pausing = Generator[Pause, None, T]  # work that pauses where it can only wait, and returns T
Steps = Pausing[Timings]
Take = Callable[[int, Tensor], int | None]


def drive(
    call: Call,
    number: int,
    sends: Sequence[Outgoing],
    recvs: Sequence[Incoming],
    take: Take,
    later: Iterable[Sequence[Outgoing]] | None = None,
) -> Pausing[None]:
    """Run round `number` of a call; what happens here counts in the transport's counters and the call's timings.

    Args:
        sends: messages that are ready.
        recvs: what comes, in the order in which it is taken.
        take: called with an index of `recvs` and its data. Returns how many bytes the message took, where the receive
            had room for more (`at_most`), or None for all of them.
        later: batches of further messages, encoded as they are asked for. On engines that interleave, a batch leaves
            while the next is encoded.

    Raises:
        PayloadError: `take` could not read a message; names rank, round and peer.
        PeerLost, Mismatch, CollectiveTimeout: as the engine has it.
    """
    timings, counters = call.timings, call.transport.counters
    posts = _post(call, number, sends, recvs, later)
    arrivals = posts[0]
    yield arrivals.waiter() if recvs else None
    now = time.perf_counter()
    for index, incoming in enumerate(recvs):
        data = arrivals.received(index)
        arrived = time.perf_counter()
        try:
            nbytes = take(index, data)
        except PayloadError as error:
            raise call.bad_payload(number, incoming.peer, error) from error
        counters.count_received(incoming.peer, data.nbytes if nbytes is None else nbytes)
        timings.wait_s += arrived - now
        now = time.perf_counter()
        timings.decode_s += now - arrived
    for posted in posts:
        posted.sent()
    timings.wait_s += time.perf_counter() - now
    counters.rounds += 1


def _post(
    call: Call,
    number: int,
    sends: Sequence[Outgoing],
    recvs: Sequence[Incoming],
    later: Iterable[Sequence[Outgoing]] | None,
) -> list[Posted]:
    """Start all messages; the receives are in the first of what is returned, and are posted before anything waits."""
    transport, timings = call.transport, call.timings
    now = time.perf_counter()
    if later is not None and not transport.interleaves:
        sends, later = [*sends, *chain.from_iterable(later)], None
        encoded = time.perf_counter()
        timings.encode_s += encoded - now
        now = encoded
    posts = [transport.post(call, sends, recvs, number)]
    _count(call, sends)
    posted = time.perf_counter()
    timings.wait_s += posted - now
    for batch in later or ():
        encoded = time.perf_counter()
        posts.append(transport.post(call, batch, (), number))
        _count(call, batch)
        timings.encode_s += encoded - posted
        posted = time.perf_counter()
        timings.wait_s += posted - encoded
    return posts


def _count(call: Call, sends: Sequence[Outgoing]) -> None:
    timings, counters = call.timings, call.transport.counters
    for send in sends:
        nbytes = send.data.nbytes
        counters.count_sent(send.peer, nbytes)
        timings.sent_nbytes += nbytes
        timings.messages += 1


def finish(steps: Pausing[T]) -> T:
    """Run pausing work to its end, without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result
