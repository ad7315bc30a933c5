"""The interface of engines, and the one driver that runs rounds on every engine.

Callers: `executor.run` for schedules, and every exchange of payloads. An engine posts the messages of a round; `drive`
alone waits for them, counts them, and handles arrivals in order. A round is a generator that pauses once, where it can
only wait, so that a thread can keep several exchanges under way: one is encoded while another is on the wire. If an
engine lets another thread wait, the round yields a function that waits. `finish` runs a round without pauses.

Invariants: a posted slice is not copied by us; every wait ends within `timeout_s` in data or a TransportError that
names rank, round and peer; bytes and messages are counted per peer; one thread uses one transport.
"""

from __future__ import annotations

import time
import weakref
import zlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor

from laconic.errors import BadInput, PayloadError, TransportError

DEFAULT_TIMEOUT_S = 300.0
POINT = 1 << 31  # sequence numbers from here on are those of messages between two ranks


@dataclass(frozen=True)
class Outgoing:
    """A slice to send; the engine reads it until `Posted.sent` returns."""

    peer: int
    data: Tensor


@dataclass(frozen=True)
class Incoming:
    """A message to receive: into `into`, or into memory of the engine's own when that is None.

    The engine's own memory is valid until the next round is posted. With `at_most` a shorter message may come, whose
    true length stands in the message itself (gloo does not tell it); the receiver gets at least that much.
    """

    peer: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    into: Tensor | None = None
    at_most: bool = False


@dataclass
class Counters:
    """Bytes and messages per peer since the transport was opened."""

    sent_nbytes: Counter[int] = field(default_factory=Counter)
    sent_messages: Counter[int] = field(default_factory=Counter)
    received_nbytes: Counter[int] = field(default_factory=Counter)
    received_messages: Counter[int] = field(default_factory=Counter)
    rounds: int = 0

    def count_sent(self, peer: int, nbytes: int) -> None:
        self.sent_nbytes[peer] += nbytes
        self.sent_messages[peer] += 1

    def count_received(self, peer: int, nbytes: int) -> None:
        self.received_nbytes[peer] += nbytes
        self.received_messages[peer] += 1

    @property
    def total_sent_nbytes(self) -> int:
        return sum(self.sent_nbytes.values())


@dataclass
class Timings:
    """The seconds that an exchange spent by activity, and the bytes it sent."""

    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    sent_nbytes: int = 0
    messages: int = 0


@dataclass(eq=False)
class Call:
    """A collective under way on one rank; leave it with `with`, so that the transport knows whether it was finished.

    Several can be under way on one transport: every message carries its call's code, and only equal calls match.

    Attributes:
        sequence: counts the calls on one transport, so that two in a row cannot be taken for each other.
        signature: what ranks compare: everything but the sequence number.
        code: 31 bits of signature and sequence, which every message carries.
        failed: an exception left it, and the other ranks may still wait for this one.
    """

    transport: Transport
    sequence: int
    collective: str
    algorithm: str
    numel: int
    dtype: str
    detail: str = ""
    rounds: int = 0
    timings: Timings = field(default_factory=Timings)
    failed: bool = False

    def __post_init__(self) -> None:
        extra = f" {self.detail}" if self.detail else ""
        self.signature = f"{self.collective} by {self.algorithm} of {self.numel} × {self.dtype}{extra}"
        self.code = zlib.crc32(f"{self.sequence} {self.signature}".encode()) & 0x7FFFFFFF

    def where(self, round: int | None = None) -> str:
        """The beginning of every error: `[rank 3/8] ring all_reduce, round 5 of 14`."""
        text = f"{self.transport.title} {self.algorithm} {self.collective}"
        return text if round is None else f"{text}, round {round + 1} of {self.rounds}"

    def bad_payload(self, round: int, peer: int, error: PayloadError) -> PayloadError:
        """`error` with the rank, the round and the peer it came from."""
        failure = PayloadError(f"{self.where(round)}: peer {self.transport.named(peer)} sent a bad payload: {error}")
        failure.peer = self.transport.named(peer)
        return failure

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.transport.leave(self)
        else:
            self.failed = True


class Posted(ABC):
    """A round under way."""

    @abstractmethod
    def received(self, index: int) -> Tensor:
        """Wait for the index-th incoming message of the round; returns its values (`into` when that was given)."""

    @abstractmethod
    def sent(self) -> None:
        """Wait until every outgoing slice of the round may be written to again."""

    def waiter(self) -> Callable[[], None] | None:
        """Return a function that waits for all incoming messages on any thread; None if only the posting thread may."""
        return None


class Transport(ABC):
    """One rank's end of an engine."""

    engine: str = ""
    has_futures: bool = False
    interleaves: bool = False  # rounds of several calls may be under way at once, received into the caller's memory
    sized: bool = False  # a message has exactly the length of its receive: `Incoming.at_most` is refused
    collects: bool = False  # `start_all_to_all` and `start_all_gather` work, on bytes that lie on `device`
    device: torch.device = torch.device("cpu")  # where messages lie; what lies elsewhere is copied, or refused

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.counters = Counters()
        self.broken: TransportError | None = None  # what every later call raises
        self.calls: tuple[Call, ...] = ()  # under way, or left by an exception; replaced, never changed
        self._sequence = 0
        self._points: dict[tuple[int, int], int] = {}  # messages so far, by source and target
        self._splits = 0
        self.members: Sequence[int] | None = None  # of a part of the job: its ranks' numbers in the whole of it
        self.job_size = world_size
        self.whole: Transport = self  # the job's, of which this one may be a part
        self.cause: TransportError | None = None  # of the whole: the first failure, for which all parts are left
        self.parts: list[weakref.ref[Transport]] = []  # that this one was split into
        self.guards: list[weakref.WeakMethod[Callable[[], None]]] = []  # of jobs that have exchanges under way

    def call(self, collective: str, algorithm: str, numel: int, dtype: str, detail: str = "", rounds: int = 0) -> Call:
        """Enter a collective, for use in `with`; its messages carry its code, so that only equal calls match."""
        await_jobs(self)
        self._sequence += 1
        return self.enter(Call(self, self._sequence, collective, algorithm, numel, dtype, detail, rounds))

    def point(self, source: int, target: int, numel: int, dtype: str) -> Call:
        """Enter the next message from one rank to another: a call of those two, which the others do not count.

        Its sequence number is beyond those of collectives, and the same at both ends.
        """
        await_jobs(self)
        turn = self._points[source, target] = self._points.get((source, target), 0) + 1
        sequence = POINT | ((turn * self.world_size + source) * self.world_size + target) % POINT
        route = f"from rank {self.named(source)} to rank {self.named(target)}"
        return self.enter(Call(self, sequence, "message", "direct", numel, dtype, route, 1))

    def split(self, colours: Sequence[int]) -> Transport:
        """A transport among the ranks of this one's colour, on the same engine; `World.split` has checked the rest."""
        raise NotImplementedError(f"{self.engine} cannot be split")

    def adopt(self, part: Transport, members: Sequence[int]) -> None:
        """Register `part`, among these of this transport's ranks: its errors use job-wide rank numbers."""
        part.members, part.job_size = [self.named(member) for member in members], self.job_size
        part.whole = self.whole
        self.parts.append(weakref.ref(part))

    def named(self, rank: int) -> int:
        """The job-wide number of one of this transport's ranks."""
        return rank if self.members is None else self.members[rank]

    def tell_cause(self) -> None:
        """Before leaving because of a loss, tell the ranks that wait here, and in this transport's parts, the cause."""
        for part in (each() for each in self.parts):
            if part is not None:
                part.tell_cause()

    def close_parts(self) -> None:
        """Close the parts of this transport, so that ranks that wait there learn that this one has left.

        All are told the cause before any is closed, because closing waits a while for ranks that do not answer.
        """
        self.tell_cause()
        for part in (each() for each in self.parts):
            if part is not None:
                part.close_parts()
                part.close()

    def enter(self, call: Call) -> Call:
        """Register a call as under way, and return it; an earlier failed one is dropped."""
        self.calls = (*(each for each in self.calls if not each.failed), call)
        return call

    def leave(self, call: Call) -> None:
        """Mark a call as ended."""
        self.calls = tuple(each for each in self.calls if each is not call)

    @property
    def current(self) -> Call | None:
        """The call that was entered last and has not been left."""
        return self.calls[-1] if self.calls else None

    @abstractmethod
    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        """Start messages of one round of a call. Only `drive` calls this, and counts."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections and threads; safe to call twice."""

    def abandon(self, reason: str, *, expected: bool = False) -> None:
        """Leave the call this rank is in and cannot finish; the others get PeerLost, naming it, instead of a wait.

        The transport cannot be used afterwards. Outside a call nobody waits for this rank, and nothing happens, unless
        the others have begun, or will begin, one that this rank was `expected` in.
        """
        if self.calls or expected:
            self.close()

    def give_up(self, failure: TransportError) -> None:
        """Make every later call raise `failure`; this rank's other parts learn of it when it closes them."""
        self.broken = failure
        self.whole.cause = self.whole.cause or failure

    def break_off(self, failure: TransportError) -> None:
        """Make every later call raise `failure`; may be called from other threads."""
        self.broken = self.broken or failure
        for part in (each() for each in self.parts):
            if part is not None:
                part.break_off(failure)

    def check_usable(self) -> None:
        """Raise the error that broke this transport, if any."""
        if (old := self.broken) is not None:
            raise type(old)(str(old), rank=old.rank, peer=old.peer, round=old.round) from old

    def failure(
        self,
        kind: type[TransportError],
        text: str,
        peer: int | None = None,
        round: int | None = None,
        call: Call | None = None,
    ) -> TransportError:
        """An error that begins with where this rank is, in `call` or the current one; `peer` is a number in the job."""
        return kind(f"{self.where(round, call)}: {text}", rank=self.named(self.rank), peer=peer, round=round)

    def native_all_reduce(self, tensor: Tensor, op: str) -> bool:
        """Reduce 1-D `tensor` in place by the engine's own all-reduce; False when the engine has none."""
        return False

    def start_native(self, tensor: Tensor) -> Callable[[], None]:
        """Start to sum 1-D `tensor` by the engine's own all-reduce; returns a function that waits for its end.

        Every rank must be in the same call, with tensors of the same size and dtype: see `executor.agree`.
        """
        if not self.native_all_reduce(tensor, "sum"):
            raise BadInput(f"{self.where()}: {self.engine} has no all-reduce of its own for {tensor.dtype}")
        return lambda: None

    def native_future(self, tensor: Tensor) -> Any:
        """As `start_native`, but return a torch future, on engines that `has_futures`."""
        raise NotImplementedError(f"{self.engine} has no futures")

    def start_all_to_all(
        self, target: Tensor, source: Tensor, received: Sequence[int], sent: Sequence[int]
    ) -> Callable[[], None]:
        """Start to send each rank its part of `source`, of `sent` bytes, on engines that `collects`.

        Returns a function after which the current stream has `target`, of `received` bytes a rank.
        """
        raise NotImplementedError(f"{self.engine} has no all-to-all of its own")

    def start_all_gather(self, target: Tensor, source: Tensor) -> Callable[[], None]:
        """As `start_all_to_all`: send `source` to all ranks, and receive theirs, in order, of the same length."""
        raise NotImplementedError(f"{self.engine} has no all-gather of its own")

    def late(self, call: Call, round: int) -> TransportError:
        """The error of a collective whose data are not there in time, on engines that `collects`."""
        raise NotImplementedError(f"{self.engine} has no collectives of its own")

    @property
    def has_native(self) -> bool:
        """Whether `native_all_reduce` works on this engine."""
        return type(self).native_all_reduce is not Transport.native_all_reduce

    def adds(self, dtype: torch.dtype) -> bool:
        """Whether the engine's own all-reduce takes this type."""
        return self.has_native

    def where(self, round: int | None = None, call: Call | None = None) -> str:
        """The beginning of every error: `[rank 3/8] ring all_reduce, round 5 of 14`, in `call` or the current one."""
        call = call or self.current
        return self.title if call is None else call.where(round)

    @property
    def title(self) -> str:
        """This rank and their number, in the whole job: `[rank 3/8]`."""
        return f"[rank {self.named(self.rank)}/{self.job_size}]"

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def await_jobs(transport: Transport) -> None:
    """Wait for the jobs' exchanges on this transport, unless the caller is one of their threads."""
    for guard in transport.guards:
        if (wait := guard()) is not None:
            wait()


def members_of(colours: Sequence[int], rank: int) -> list[int]:
    """The ranks that have the colour of `rank`, in order."""
    return [other for other, colour in enumerate(colours) if colour == colours[rank]]


class Arena:
    """Memory for messages that are added on arrival: kept from call to call, handed out piece by piece in a round."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, Tensor] = {}
        self._used = 0

    def recycle(self) -> None:
        """Begin a round: everything handed out before may be overwritten."""
        self._used = 0

    def take(self, incoming: Incoming) -> Tensor:
        """A piece for one message, aligned to 64 bytes."""
        nbytes = incoming.numel * incoming.dtype.itemsize
        first, last = self._used, self._used + nbytes
        block = self._blocks.get(incoming.device)
        if block is None or last > block.numel():
            # Pieces handed out earlier in this round keep the old block alive; the new one serves from here on.
            first, last = 0, nbytes
            size = max(nbytes, 2 * (0 if block is None else block.numel()))
            block = torch.empty(size, dtype=torch.uint8, device=incoming.device)
            self._blocks[incoming.device] = block
        self._used = -(-last // 64) * 64
        return block[first:last].view(incoming.dtype)


# Rounds.
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
    """Run round `number` of a call; updates the transport's counters and the call's timings.

    Args:
        sends: messages that are ready.
        recvs: the messages to receive, in the order in which they are handled.
        take: called with an index of `recvs` and its data. Returns how many bytes the message took, where the receive
            had room for more (`at_most`), or None for all of them.
        later: batches of further messages, encoded as they are asked for. On engines that interleave, a batch leaves
            while the next is encoded.

    Raises:
        PayloadError: `take` could not read a message; names rank, round and peer.
        PeerLost, Mismatch, CollectiveTimeout: from the engine.
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
    try:
        for batch in later or ():
            encoded = time.perf_counter()
            posts.append(transport.post(call, batch, (), number))
            _count(call, batch)
            timings.encode_s += encoded - posted
            posted = time.perf_counter()
            timings.wait_s += posted - encoded
    except BaseException:
        posts.clear()  # gloo's connections end with the last receive, which the error's frames would keep
        raise
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
