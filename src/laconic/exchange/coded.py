"""A compressed all-reduce over any schedule: encode per slice, decode_add into float32, feedback on every leg.

Callers: `collectives.all_reduce(codec=…)`, bucket groups and `fsdp.py`.

    direct        two encodings whatever P: the contribution to each chunk, and each chunk's sum
    hierarchical  float32 inside a host, the codec between hosts
    ring          one encoding a hop: the error grows with P
    butterfly     one encoding a level; both partners add decoded values, so they agree
    gather        one encoding: every rank sends its whole payload to every other, in one round, and all add up all of
                  them in order of rank. (P−1) payloads a rank: for few ranks or very small payloads (top-k)

and a reduce-scatter: one encoding, straight to the owner of each chunk, who adds it to its own part, which is never
encoded. (P−1)/P of the payload a rank.

The messages of every round are planned once (`coded_plan.py`). A step encodes into its messages and decodes out of
them. Their memory is borrowed for the round, or until payloads have been forwarded. A long channel goes
segment by segment, so that messages take little memory beside its residual.

A message is a row of uint32 lengths, one a piece, then the pieces' payloads, which begin at multiples of 16 bytes. A
piece that held NaN or infinity has a payload, too (`codecs/poison.py`): it becomes NaN everywhere, as in float32. In a
group that takes a device's tensors only, messages of `direct` stay on the device (`collective_rounds.py`).
"""

from __future__ import annotations

import functools
import struct
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Protocol

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.codecs.frame import aligned
from laconic.codecs.poison import is_poison, poison, poisons
from laconic.codecs.selector import Sparse
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.coded_plan import EXACT, Encoding, Part, Piece, PlannedRound, plan_rounds
from laconic.exchange.residuals import PLAIN, Encoder, Site
from laconic.schedules.link import Link
from laconic.transports.base import Call, Incoming, Outgoing, Pausing, Steps, Timings, Transport, drive, finish

if TYPE_CHECKING:
    from laconic.exchange.collective_rounds import CollectiveRounds

_CPU = torch.device("cpu")

def head_nbytes(pieces: int) -> int:
    """The room the lengths of `pieces` pieces take."""
    return aligned(4 * pieces)


def max_nbytes(sizes: Sequence[int]) -> int:
    """The most a message takes whose payloads take at most these bytes."""
    return head_nbytes(len(sizes)) + sum(map(aligned, sizes))


class MessagePool:
    """Memory for messages, lent while they are in transit; grows to the most ever in use at once.

    >>> pool = MessagePool()
    >>> first = pool.lend(100)
    >>> pool.take_back([first])
    >>> pool.lend(80) is first, pool.lend(80) is first
    (True, False)
    """

    def __init__(self, *, pinned: bool = False, device: torch.device = _CPU) -> None:
        self._free: list[Tensor] = []
        self._pinned = pinned  # for payloads that a device encodes and decodes
        self._device = device
        self._twins: dict[torch.device, MessagePool] = {}

    def on(self, device: torch.device) -> MessagePool:
        """The pool for messages that do not leave this device; always the same one."""
        return self._twins.setdefault(device, MessagePool(device=device))

    def lend(self, nbytes: int) -> Tensor:
        """The smallest free block of `nbytes` to twice as many, or a new one of zeros: gaps in messages are sent."""
        sizes = [(block.numel(), place) for place, block in enumerate(self._free)]
        fitting = [each for each in sizes if nbytes <= each[0] <= 2 * nbytes]
        if fitting:
            return self._free.pop(min(fitting)[1])
        if not self._pinned:
            return torch.zeros(nbytes, dtype=torch.uint8, device=self._device)
        from laconic.codecs.device.streams import pin

        device = torch.accelerator.current_accelerator() or _CPU
        return pin(nbytes, torch.uint8, device, "messages", "use smaller buckets").zero_()

    def take_back(self, blocks: Sequence[Tensor]) -> None:
        """Return blocks that are no longer read or written."""
        self._free += blocks


class Writer:
    """Writes a message piece by piece, from payloads of at most these sizes; reused every step.

    >>> writer = Writer([4, 4])
    >>> writer.begin(torch.zeros(writer.nbytes, dtype=torch.uint8))
    >>> _ = writer.room().fill_(7)
    >>> writer.add(writer.room()[:3]), writer.add(torch.ones(1, dtype=torch.uint8))
    (None, None)
    >>> unpack(writer.finish(), 2)
    ([tensor([7, 7, 7], dtype=torch.uint8), tensor([1], dtype=torch.uint8)], 48)
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.nbytes = max_nbytes(sizes)
        self._count = len(sizes)
        self._memory = torch.empty(0)
        self._at = 0
        self._lengths: list[int] = []

    def begin(self, memory: Tensor) -> None:
        """Write into `memory`, of at least `nbytes`, from now on."""
        self._memory = memory
        self._at = head_nbytes(self._count)
        self._lengths = []

    def room(self) -> Tensor:
        """The memory to encode the next payload into."""
        return self._memory[self._at :]

    def add(self, payload: Tensor) -> None:
        """Append a piece: the payload that was encoded into `room()`, or a copy of another payload."""
        length = payload.numel()
        if payload.data_ptr() != self._memory.data_ptr() + self._at:
            self._memory[self._at : self._at + length] = payload
        self._lengths.append(length)
        self._at += aligned(length)

    def finish(self, *, padded: bool = False) -> Tensor:
        """The whole message, a view of the memory; `padded` has the most bytes that a message of this sort takes."""
        struct.pack_into(f"<{self._count}I", self._memory.numpy().data, 0, *self._lengths)
        return self._memory[: self.nbytes if padded else self._at]


def pack(payloads: Sequence[Tensor]) -> Tensor:
    """A message of these payloads in memory of its own."""
    writer = Writer([payload.numel() for payload in payloads])
    writer.begin(torch.zeros(writer.nbytes, dtype=torch.uint8))
    for payload in payloads:
        writer.add(payload)
    return writer.finish()


def unpack(data: Tensor, count: int) -> tuple[list[Tensor], int]:
    """The payloads in a message, and the bytes it took."""
    at, size = head_nbytes(count), data.numel()
    if size < at:
        raise PayloadError(f"a message of {size} bytes has no room for {count} lengths")
    found: list[Tensor] = []
    for length in struct.unpack_from(f"<{count}I", data.numpy().data):
        if at + length > size:
            raise PayloadError(f"a piece of {length} bytes does not fit a message of {size}")
        found.append(data[at : at + length])
        at += aligned(length)
    return found, at


@dataclass
class Channel:
    """A float32 buffer, its codec and its encoder."""

    buffer: Tensor
    codec: Codec
    encoder: Encoder = PLAIN

    def carry(self) -> None:
        """Add the residual of a former schedule, world or codec to the buffer."""
        self.encoder.carry(self.buffer)

    def encode(self, values: Tensor, site: Site, draws: int, room: Tensor, copies: int = 1) -> Tensor:
        """Encode `values`, a part of the buffer, into `room`; poison if they hold NaN or infinity.

        The residual of `site` is added, then updated; `copies` ranks encode the same values.
        """
        codec = for_values(self.codec, values)
        try:
            return self.encoder.encode(codec, values, site, step=draws, out=room, copies=copies)
        except NonFiniteError:
            return poison(values.numel(), room)


def for_values(coder: Codec, values: Tensor) -> Codec:
    """The codec for these values: the processor's, or the one of the device they lie on."""
    if values.is_cpu:
        return coder
    from laconic.codecs.device import on_device

    return on_device(coder, values.device)


def decode(coder: Codec, payload: Tensor, values: Tensor, *, add: bool, divisor: int = 1) -> None:
    """Add a payload to `values`, or overwrite them with it, divided; poison makes them NaN."""
    coder = for_values(coder, values)
    if poisons(payload, values):
        return
    if add:
        coder.decode_add(payload, values)
    elif divisor != 1:
        coder.decode_mean([payload], divisor, values)
    else:
        coder.decode(payload, values.numel(), out=values)


class Exchange(Protocol):
    """A planned exchange of channels."""

    def steps(self, step: int = 0) -> Steps: ...

    def run(self, step: int = 0) -> Timings: ...


@dataclass(frozen=True)
class Route:
    """The algorithm asked for and the step of one exchange."""

    transport: Transport
    algorithm: str = "auto"
    hosts: tuple[int, ...] | None = None
    step: int = 0
    link: Link | None = None


def sizes(channels: Sequence[Channel]) -> list[tuple[Codec, int]]:
    """The codec and length of each channel, for the cost model."""
    return [(channel.codec, channel.buffer.numel()) for channel in channels]


def detail(channels: Sequence[Channel]) -> str:
    """The text by which ranks compare the channels they exchange."""
    return " and ".join(f"{channel.buffer.numel()} through {channel.codec}" for channel in channels)


def stays_on_device(
    channels: Sequence[Channel], transport: Transport, algorithm: str, hosts: tuple[int, ...] | None
) -> bool:
    """Whether these channels' payloads travel on the device, by collectives of the engine's own group."""
    if not transport.collects or algorithm != "direct" or hosts is not None:
        return False
    return all(channel.codec.fixed_size and channel.buffer.device == transport.device for channel in channels)


def reduce_scatter_steps(channels: Sequence[Channel], transport: Transport, step: int = 0) -> Steps:
    """Sum over all ranks row r of every channel into rank r's row r; the other rows are scratch afterwards.

    The buffers are P × n float32, with residuals over P·n values or none; all channels share one message a peer.
    """
    flat = [replace(channel, buffer=channel.buffer.view(-1)) for channel in channels]
    return CodedExchange(flat, transport, algorithm="direct", collective="reduce_scatter").steps(step)


@dataclass(frozen=True)
class _Round:
    """A planned round with the writers of its messages and the sizes of its receives, which have no memory yet."""

    planned: PlannedRound
    writers: tuple[Writer, ...]
    recvs: tuple[Incoming, ...]
    whole: tuple[Part, ...]  # what this rank sends of whole channels

    @classmethod
    def of(cls, planned: PlannedRound, whole: frozenset[int], *, sized: bool) -> _Round:
        writers = tuple(Writer([part.max_nbytes for part in parts]) for _, parts in planned.sends)
        sizes = [(peer, max_nbytes([part.max_nbytes for part in parts])) for peer, parts in planned.recvs]
        recvs = tuple(Incoming(peer, nbytes, torch.uint8, _CPU, at_most=not sized) for peer, nbytes in sizes)
        own = {part.channel: part for _, parts in planned.sends for part in parts if part.channel in whole}
        return cls(planned, writers, recvs, tuple(own.values()))

    @property
    def nbytes(self) -> list[int]:
        """The memory of each message, sent and received."""
        return [*(writer.nbytes for writer in self.writers), *(incoming.numel for incoming in self.recvs)]


class CodedExchange:
    """A compressed all-reduce or reduce-scatter of these channels, whose plan is kept from step to step.

    Args:
        channels: to be summed; their buffers may be replaced by others of the same length before every `run`.
        algorithm: gather, or any algorithm of the collective.
        hosts: the host of each rank, to leave messages inside a host in float32; None compresses all.
        divisor: what the sums are divided by, for means.
        pool: the messages' memory, shared with exchanges that are not under way at the same time.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        transport: Transport,
        *,
        algorithm: str,
        collective: str = "all_reduce",
        hosts: tuple[int, ...] | None = None,
        divisor: int = 1,
        pool: MessagePool | None = None,
    ) -> None:
        self.channels = list(channels)
        self.transport = transport
        self.algorithm = algorithm
        self.divisor = divisor
        numels = [channel.buffer.numel() for channel in channels]
        coders = [channel.codec for channel in channels]
        plan = plan_rounds(numels, coders, (transport.rank, transport.world_size), collective, algorithm, hosts)
        self.rounds = [_Round.of(planned, plan.whole, sized=transport.sized) for planned in plan.rounds]
        self.whole, self._held = plan.whole, plan.held
        self._claim = (collective, algorithm, sum(numels), "float32", detail(self.channels), len(self.rounds))
        # By direct every slice ends as what a payload decodes to, on all ranks: it is divided there, in the same pass.
        self._last_divisor = divisor if algorithm == "direct" and hosts is None and transport.world_size > 1 else 1
        # Casts are divided before their sums are encoded: a sum of half floats may overflow where the mean does not.
        casts = (i for i, channel in enumerate(self.channels) if channel.codec.fine and channel.encoder is PLAIN)
        self._divided = frozenset(casts if self._last_divisor != 1 else ())
        self._pool = pool or MessagePool()
        self._payloads: dict[tuple[int, Piece], Tensor] = {}  # of this run
        self._gathered: dict[int, dict[int, Tensor]] = {i: {} for i in self.whole}  # by channel and rank
        self._on_device: CollectiveRounds | None = None
        if stays_on_device(self.channels, transport, algorithm, hosts):
            from laconic.exchange.collective_rounds import CollectiveRounds

            self._pool = self._pool.on(transport.device)
            self._on_device = CollectiveRounds(self, transport, self._pool.lend)

    def run(self, step: int = 0) -> Timings:
        """Sum the channels' buffers over all ranks; draws of stochastic codecs differ by step, rank and round."""
        return finish(self.steps(step))

    def steps(self, step: int = 0) -> Steps:
        """As `run`, pausing wherever it can only wait."""
        with self.transport.call(*self._claim) as call:
            yield from self.steps_in(call, step)
        return call.timings

    def steps_in(self, call: Call, step: int, first: int = 0) -> Pausing[None]:
        """As `steps`, as rounds `first` onwards of a call that also does other work.

        An exchange has one call, however many sums it takes: calls are numbered when they begin, and where several
        exchanges are under way only their beginnings come in the same order on all ranks.
        """
        for channel in self.channels:
            channel.carry()
        self._payloads.clear()
        lent: list[Tensor] = []
        for number, round_ in enumerate(self.rounds):
            draws = (step * len(self.rounds) + number) * self.transport.world_size
            if self._on_device is not None:
                lent += yield from self._on_device.steps(call, first, number, round_.planned, draws)
            elif round_.writers or round_.recvs:
                blocks = [self._pool.lend(nbytes) for nbytes in round_.nbytes]
                recvs = self._borrow(round_, blocks)
                take = functools.partial(self._take, round_, number, recvs)
                written = self._written(round_, number, draws)
                yield from drive(call, first + number, (), recvs, take, written)
                lent += blocks
            self._add_whole(call, first + number, round_)
            if number not in self._held:
                self._payloads.clear()
                self._pool.take_back(lent)
                lent = []
        if self._on_device is not None:
            self._on_device.finish(call)
        self._pool.take_back(lent)  # after an error somebody may still write to it
        for index, channel in enumerate(self.channels):
            if self.divisor != self._last_divisor and index not in self.whole:
                channel.buffer.div_(self.divisor)

    def _borrow(self, round_: _Round, blocks: Sequence[Tensor]) -> list[Incoming]:
        """Assign these blocks to a round's messages; returns its receives."""
        for writer, block in zip(round_.writers, blocks, strict=False):
            writer.begin(block)
        pairs = zip(round_.recvs, blocks[len(round_.writers) :], strict=True)
        return [Incoming(r.peer, r.numel, r.dtype, r.device, block[: r.numel], r.at_most) for r, block in pairs]

    def _written(self, round_: _Round, number: int, draws: int) -> Iterator[list[Outgoing]]:
        """The messages of a round, encoded one after the other."""
        encoded: set[tuple[int, Piece]] = set()
        for (peers, parts), writer in zip(round_.planned.sends, round_.writers, strict=True):
            for part in parts:
                writer.add(self.payload(part, number, draws, writer.room(), encoded))
            data = writer.finish(padded=self.transport.sized)
            yield [Outgoing(peer, data) for peer in peers]

    def payload(self, part: Part, number: int, draws: int, room: Tensor, encoded: set[tuple[int, Piece]]) -> Tensor:
        """The payload of a part: encoded into `room`, or that of another message or round, which is to be copied."""
        key = (part.channel, part.piece)
        if part.encoding is not None and key not in encoded:
            self._payloads[key] = self._encode(part, part.encoding, number, draws, room)
            encoded.add(key)
        return self._payloads[key]

    def _encode(self, part: Part, encoding: Encoding, number: int, draws: int, room: Tensor) -> Tensor:
        channel, piece = self.channels[part.channel], part.piece
        values = channel.buffer[piece.start : piece.stop]
        draws += encoding.stream
        if encoding.adopt and part.channel in self._divided:
            values.div_(self._last_divisor)
        if piece.exact:
            payload = for_values(EXACT, values).encode(values, step=draws, out=room)
        else:
            site = (number, piece.start, piece.stop)
            payload = channel.encode(values, site, draws, room, encoding.copies)
        if encoding.adopt:
            decode(part.coder, payload, values, add=False, divisor=self._divisor(part))
        return payload

    def _divisor(self, part: Part) -> int:
        """The divisor of a slice at decoding."""
        return 1 if part.channel in self._divided else self._last_divisor

    def _take(self, round_: _Round, number: int, recvs: Sequence[Incoming], index: int, data: Tensor) -> int:
        """Decode a message into its slices; keep payloads that a later round may forward."""
        incoming, parts = recvs[index], round_.planned.recvs[index][1]
        payloads, nbytes = unpack(data, len(parts))
        for part, payload in zip(parts, payloads, strict=True):
            self.decode_part(part, payload, incoming.peer)
            if not part.add and number in self._held:
                self._payloads[part.channel, part.piece] = _kept(incoming, payload, data)
        return nbytes

    def decode_part(self, part: Part, payload: Tensor, peer: int) -> None:
        """Decode a payload from `peer` into its slice; one of a whole channel waits for the others."""
        if part.channel in self.whole:
            self._gathered[part.channel][peer] = payload
        else:
            values = self.channels[part.channel].buffer[part.piece.start : part.piece.stop]
            decode(part.coder, payload, values, add=part.add, divisor=self._divisor(part))

    def _add_whole(self, call: Call, number: int, round_: _Round) -> None:
        """Average all ranks' payloads of the whole channels, in order of rank: the same bits everywhere."""
        begun = time.perf_counter()
        for part in round_.whole:
            index, came = part.channel, self._gathered[part.channel]
            came[self.transport.rank] = self._payloads[index, part.piece]
            payloads = [came[rank] for rank in range(self.transport.world_size)]
            values = self.channels[index].buffer[part.piece.start : part.piece.stop]
            try:
                self._average(part.coder, payloads, values)
            except PayloadError:
                for rank, payload in enumerate(payloads):
                    _check(call, number, rank, part.coder, payload, values.numel())
                raise
        call.timings.decode_s += time.perf_counter() - begun

    def _average(self, coder: Codec, payloads: Sequence[Tensor], values: Tensor) -> None:
        """Set `values` to the mean of all ranks' payloads; only selected values are touched."""
        if any(poisons(payload, values) for payload in payloads):
            return
        if not isinstance(coder, Sparse):
            for_values(coder, values).decode_mean(payloads, self.divisor, values)
        else:
            values.zero_()
            for payload in payloads:
                indices, selected = coder.decode_sparse(payload, values.numel())
                values.index_add_(0, indices.to(values.device), selected.div_(self.divisor).to(values.device))


def _kept(incoming: Incoming, payload: Tensor, data: Tensor) -> Tensor:
    """A payload that a later round passes on: copied where it lies in the engine's memory, not in ours."""
    ours = incoming.into is not None and data.data_ptr() == incoming.into.data_ptr()
    return payload if ours else payload.clone()


def _check(call: Call, round: int, rank: int, coder: Codec, payload: Tensor, numel: int) -> None:
    """Raise an error that names this rank if it has sent a bad payload."""
    try:
        if not is_poison(payload, numel):
            coder.decode(payload, numel)
    except PayloadError as error:
        raise call.bad_payload(round, rank, error) from error


