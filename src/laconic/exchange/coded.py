"""A compressed all-reduce over any schedule: encode per slice, decode_add into float32, feedback on every leg.

Callers: `collectives.all_reduce(codec=…)`, bucket groups and `fsdp.py`.

    direct        two encodings whatever P: the contribution to each chunk, and each chunk's sum
    hierarchical  float32 inside a host, the codec between hosts
    ring          one encoding a hop: the error grows with P
    butterfly     one encoding a level; both partners add decoded values, so they agree
    gather        one encoding: every rank sends its whole payload to every other, in one round, and all add up all of
                  them in order of rank. (P−1) payloads a rank: for few ranks or very small payloads (top-k)
    scatter       reduce-scatter: one encoding, straight to the owner of each chunk, who adds it to its own part, which
                  is never encoded. (P−1)/P of the payload a rank

What is sent and received in every round is worked out once (`pieces.py`). A step encodes into its messages and decodes
out of them; their memory is borrowed for the round, or until payloads were passed on. A long channel goes segment by
segment, so that messages take little memory beside its residual. A piece that holds NaN or infinity travels as poison
(see `message.py`) and becomes NaN everywhere, as it would in float32, instead of an error on one rank alone.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.codecs.selector import Sparse
from laconic.errors import PayloadError
from laconic.exchange.message import Channel, MessagePool, Writer, decode, detail, max_nbytes, unpack
from laconic.exchange.pieces import CodedStep, Encoding, Parcel, Piece, Program, coded_program, held_after, in_segments
from laconic.schedules.registry import build
from laconic.transports.base import Call, Incoming, Outgoing, Timings, Transport
from laconic.transports.rounds import Pausing, Steps, drive, finish

GATHER, SCATTER = "gather", "scatter"
_EXACT = codec("none")
_IDLE = CodedStep()
_CPU = torch.device("cpu")
SMALL = 1 / 16  # of all values, times the world size: an exact channel up to this is sent whole
SEGMENT_NBYTES = 4 << 20  # of payload: what is under way at once, up to four exchanges of this, sent and received


def reduce_scatter_coded(channels: Sequence[Channel], transport: Transport, *, step: int = 0) -> Timings:
    """Sum over all ranks row r of every channel into rank r's row r; the other rows are scratch afterwards.

    The buffers are P × n float32, with residuals over P·n values or none; all channels share one message a peer.
    """
    flat = [replace(channel, buffer=channel.buffer.view(-1)) for channel in channels]
    return CodedExchange(flat, transport, algorithm=SCATTER).run(step * transport.world_size + transport.rank)


@dataclass(frozen=True)
class _Part:
    """A piece of a channel within a message; `encoding` is None where a payload from an earlier round is passed on."""

    channel: int
    piece: Piece
    coder: Codec
    add: bool
    encoding: Encoding | None = None

    @property
    def max_nbytes(self) -> int:
        return self.coder.max_nbytes(self.piece.stop - self.piece.start)


@dataclass(frozen=True)
class _Message:
    """One message and whom it goes to: peers that get the same pieces get the same bytes."""

    peers: tuple[int, ...]
    parts: tuple[_Part, ...]
    writer: Writer


@dataclass(frozen=True)
class _Round:
    messages: tuple[_Message, ...]
    recvs: tuple[Incoming, ...]  # without memory
    arrivals: tuple[tuple[_Part, ...], ...]  # what each of recvs holds

    @property
    def nbytes(self) -> list[int]:
        """The memory of each message, sent and received."""
        return [*(message.writer.nbytes for message in self.messages), *(incoming.numel for incoming in self.recvs)]


class CodedExchange:
    """The plan of a compressed all-reduce of these channels, kept from step to step.

    Args:
        channels: what is summed; their buffers may be replaced by others of the same length before every `run`.
        algorithm: gather, scatter, or any all-reduce algorithm.
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
        hosts: tuple[int, ...] | None = None,
        divisor: int = 1,
        pool: MessagePool | None = None,
    ) -> None:
        self.channels = list(channels)
        self.transport = transport
        self.algorithm = algorithm
        self.divisor = divisor
        self.numel = sum(channel.buffer.numel() for channel in channels)
        self.detail = detail(self.channels)
        self.whole = self._whole_channels()
        programs, count = self._programs(hosts)
        planned = [[program.get(number, _IDLE) for program in programs] for number in range(count)]
        self.rounds = [self._plan(steps) for steps in planned]
        self._held = held_after(planned)
        # By direct every slice ends as what a payload decodes to, on all ranks: it is divided there, in the same pass.
        self._last_divisor = divisor if algorithm == "direct" and hosts is None and transport.world_size > 1 else 1
        self._pool = pool or MessagePool()
        self._payloads: dict[tuple[int, Piece], Tensor | None] = {}  # of this run; None: poisoned
        self._gathered: dict[int, dict[int, Tensor | None]] = {i: {} for i in self.whole}  # by channel and rank

    def _whole_channels(self) -> set[int]:
        """The channels that go whole to everyone: all of `gather`, of `direct` the small exact ones, to spare calls."""
        if self.algorithm == GATHER:
            return set(range(len(self.channels)))
        if self.algorithm != "direct" or self.transport.world_size == 1:
            return set()
        few = self.numel * SMALL / self.transport.world_size
        numels = [channel.buffer.numel() if channel.codec == _EXACT else 0 for channel in self.channels]
        return {i for i, numel in enumerate(numels) if 0 < numel <= few}

    def _programs(self, hosts: tuple[int, ...] | None) -> tuple[list[Program], int]:
        """What this rank does for each channel, by round, and how many rounds there are."""
        size, rank = self.transport.world_size, self.transport.rank
        if self.algorithm == SCATTER:
            return [_to_owners(channel.buffer.numel(), rank, size) for channel in self.channels], 1
        parameters = {"hosts": hosts} if self.algorithm == "hierarchical" and hosts is not None else {}

        def program(index: int, numel: int) -> tuple[Program, int]:
            if self.algorithm == GATHER:
                return _to_all(numel, rank, size, exact=False), 1
            schedule = build("all_reduce", self.algorithm, size, numel, **parameters)
            if index in self.whole:
                return _to_all(numel, rank, size, exact=True), schedule.rounds
            return coded_program(schedule, rank, hosts), schedule.rounds

        found = [
            in_segments(channel.buffer.numel(), _segments(channel), functools.partial(program, index))
            for index, channel in enumerate(self.channels)
        ]
        return [each for each, _ in found], max((rounds for _, rounds in found), default=0)

    def _plan(self, steps: list[CodedStep]) -> _Round:
        """One round of all channels."""
        fresh = [{encoding.piece: encoding for encoding in step.encodings} for step in steps]
        peers: dict[tuple[_Part, ...], list[int]] = {}
        for peer, parcels in _by_peer([step.sends for step in steps]):
            peers.setdefault(self._parts(parcels, fresh), []).append(peer)
        if not peers and any(fresh):  # a rank alone gathers what it has encoded itself
            alone = [(i, Parcel(self.transport.rank, (piece,), True)) for i, row in enumerate(fresh) for piece in row]
            peers[self._parts(alone, fresh)] = []
        messages = [
            _Message(tuple(to), parts, Writer([part.max_nbytes for part in parts])) for parts, to in peers.items()
        ]
        recvs, arrivals = [], []
        for peer, parcels in _by_peer([step.recvs for step in steps]):
            parts = self._parts(parcels)
            most = max_nbytes([part.max_nbytes for part in parts])
            recvs.append(Incoming(peer, most, torch.uint8, _CPU, at_most=True))
            arrivals.append(parts)
        return _Round(tuple(messages), tuple(recvs), tuple(arrivals))

    def _parts(
        self, parcels: list[tuple[int, Parcel]], fresh: Sequence[dict[Piece, Encoding]] = ()
    ) -> tuple[_Part, ...]:
        """What one message holds; `fresh` are the encodings of its round, by channel, where it is sent."""
        return tuple(
            _Part(
                channel,
                piece,
                _EXACT if piece.exact else self.channels[channel].codec,
                parcel.add,
                fresh[channel].get(piece) if fresh else None,
            )
            for channel, parcel in parcels
            for piece in parcel.pieces
        )

    def run(self, step: int = 0) -> Timings:
        """Sum the channels' buffers over all ranks; draws of stochastic codecs differ by step, rank and round."""
        return finish(self.steps(step))

    def steps(self, step: int = 0) -> Steps:
        """As `run`, pausing whenever there is nothing to do but wait."""
        done = ("reduce_scatter", "direct") if self.algorithm == SCATTER else ("all_reduce", self.algorithm)
        claim = (*done, self.numel, "float32", self.detail, len(self.rounds))
        with self.transport.call(*claim) as call:
            yield from self.steps_in(call, step)
        return call.timings

    def steps_in(self, call: Call, step: int, first: int = 0) -> Pausing[None]:
        """As `steps`, as rounds `first` and following of a call that does more than this.

        An exchange has one call, however many sums it takes: calls are numbered when they begin, and where several
        exchanges are under way only their beginnings come in the same order on all ranks.
        """
        for channel in self.channels:
            channel.carry()
        self._payloads.clear()
        lent: list[Tensor] = []
        for number, round_ in enumerate(self.rounds):
            if round_.messages or round_.recvs:
                draws = (step * len(self.rounds) + number) * self.transport.world_size
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
        self._pool.take_back(lent)  # after an error somebody may still write to it
        for index, channel in enumerate(self.channels):
            if self.divisor != self._last_divisor and index not in self.whole:
                channel.buffer.div_(self.divisor)

    def _borrow(self, round_: _Round, blocks: Sequence[Tensor]) -> list[Incoming]:
        """Let a round's messages be in these blocks; returns its receives."""
        count = len(round_.messages)
        for message, block in zip(round_.messages, blocks, strict=False):
            message.writer.begin(block)
        pairs = zip(round_.recvs, blocks[count:], strict=True)
        return [Incoming(r.peer, r.numel, r.dtype, r.device, block[: r.numel], r.at_most) for r, block in pairs]

    def _written(self, round_: _Round, number: int, draws: int) -> Iterator[list[Outgoing]]:
        """The messages of a round, encoded one after the other."""
        encoded: set[tuple[int, Piece]] = set()
        for message in round_.messages:
            data = self._write(message, number, draws, encoded)
            yield [Outgoing(peer, data) for peer in message.peers]

    def _write(self, message: _Message, number: int, draws: int, encoded: set[tuple[int, Piece]]) -> Tensor:
        """Encode the pieces of a message, each where it lies; those that another message or round had are copied."""
        writer = message.writer
        for part in message.parts:
            key = (part.channel, part.piece)
            if part.encoding is not None and key not in encoded:
                self._payloads[key] = self._encode(part, part.encoding, number, draws, writer.room())
                encoded.add(key)
            writer.add(self._payloads[key])
        return writer.finish()

    def _encode(self, part: _Part, encoding: Encoding, number: int, draws: int, room: Tensor) -> Tensor | None:
        channel, piece = self.channels[part.channel], part.piece
        values = channel.buffer[piece.start : piece.stop]
        draws += encoding.stream
        if piece.exact:
            payload: Tensor | None = _EXACT.encode(values, step=draws, out=room)
        else:
            site = (number, piece.start, piece.stop)
            payload = channel.encode(values, site, draws, room, encoding.copies)
        if encoding.adopt:
            decode(part.coder, payload, values, add=False, divisor=self._last_divisor)
        return payload

    def _take(self, round_: _Round, number: int, recvs: Sequence[Incoming], index: int, data: Tensor) -> int:
        """Decode what came into its slices; payloads that a later round may pass on are kept."""
        incoming, parts = recvs[index], round_.arrivals[index]
        payloads, nbytes = unpack(data, len(parts))
        for part, payload in zip(parts, payloads, strict=True):
            piece = part.piece
            if part.channel in self.whole:
                self._gathered[part.channel][incoming.peer] = payload
            else:
                values = self.channels[part.channel].buffer[piece.start : piece.stop]
                decode(part.coder, payload, values, add=part.add, divisor=self._last_divisor)
            if not part.add and number in self._held:
                self._payloads[part.channel, piece] = _kept(incoming, payload, data)
        return nbytes

    def _add_whole(self, call: Call, number: int, round_: _Round) -> None:
        """Average what everyone sent of the whole channels, in order of rank: the same bits everywhere."""
        begun = time.perf_counter()
        own = {part.channel: part for message in round_.messages for part in message.parts}
        for index in self.whole & own.keys():
            part, came = own[index], self._gathered[index]
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

    def _average(self, coder: Codec, payloads: Sequence[Tensor | None], values: Tensor) -> None:
        """Let `values` be the mean of all ranks' payloads; only what was selected is touched."""
        known = [payload for payload in payloads if payload is not None]
        if len(known) < len(payloads):
            values.fill_(float("nan"))
        elif not isinstance(coder, Sparse):
            coder.decode_mean(known, self.divisor, values)
        else:
            values.zero_()
            for payload in known:
                indices, selected = coder.decode_sparse(payload, values.numel())
                values.index_add_(0, indices, selected.div_(self.divisor))


def _kept(incoming: Incoming, payload: Tensor | None, data: Tensor) -> Tensor | None:
    """A payload that a later round passes on: copied where it lies in the engine's memory, not in ours."""
    ours = incoming.into is not None and data.data_ptr() == incoming.into.data_ptr()
    return payload if payload is None or ours else payload.clone()


def _segments(channel: Channel) -> int:
    """In how many segments a channel goes; a selection is among all of its values, and small."""
    if isinstance(channel.codec, Sparse):
        return 1
    return max(1, -(-channel.codec.max_nbytes(channel.buffer.numel()) // SEGMENT_NBYTES))


def _check(call: Call, round: int, rank: int, coder: Codec, payload: Tensor | None, numel: int) -> None:
    """Raise an error that names this rank if it has sent a bad payload."""
    try:
        if payload is not None:
            coder.decode(payload, numel)
    except PayloadError as error:
        raise call.bad_payload(round, rank, error) from error


def _to_all(numel: int, rank: int, world_size: int, *, exact: bool) -> Program:
    """A channel that is sent whole to everyone in the first round."""
    piece = Piece(0, numel, exact)
    others = [(rank + hop) % world_size for hop in range(1, world_size)]
    parcels = tuple(Parcel(peer, (piece,), True) for peer in others)
    return {0: CodedStep((Encoding(piece, False, rank),), parcels, parcels)}


def _to_owners(numel: int, rank: int, world_size: int) -> Program:
    """A channel of P chunks, each sent to its owner alone."""
    chunk = numel // world_size
    others = [(rank + hop) % world_size for hop in range(1, world_size)]
    pieces = {peer: Piece(peer * chunk, (peer + 1) * chunk, False) for peer in others}
    mine = Piece(rank * chunk, (rank + 1) * chunk, False)
    sends = tuple(Parcel(peer, (piece,), True) for peer, piece in pieces.items())
    recvs = tuple(Parcel(peer, (mine,), True) for peer in pieces)
    return {0: CodedStep(tuple(Encoding(piece, False, peer) for peer, piece in pieces.items()), sends, recvs)}


def _by_peer(parcels: Iterable[tuple[Parcel, ...]]) -> list[tuple[int, list[tuple[int, Parcel]]]]:
    """The parcels of all channels that go to, or come from, each peer: the k-th of every channel in one message."""
    groups: dict[tuple[int, int], list[tuple[int, Parcel]]] = {}
    for channel, row in enumerate(parcels):
        seen: dict[int, int] = {}
        for parcel in row:
            turn = seen[parcel.peer] = seen.get(parcel.peer, -1) + 1
            groups.setdefault((turn, parcel.peer), []).append((channel, parcel))
    return [(peer, parts) for (_, peer), parts in groups.items()]
