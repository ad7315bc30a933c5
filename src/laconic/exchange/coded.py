"""A compressed all-reduce over any schedule: encode per slice, decode_add into float32, feedback on every leg.

Callers: `collectives.all_reduce(codec=…)` and the DDP hook.

    direct        two encodings whatever P: the contribution to each chunk, and each chunk's sum
    hierarchical  float32 inside a host, the codec between hosts
    ring          one encoding a hop: the error grows with P
    butterfly     one encoding a level; both partners add decoded values, so they agree

What is sent and received in every round is worked out once (`pieces.py`), and the messages' memory is kept: a step
encodes into the messages and decodes out of them. A piece that holds NaN or infinity travels as poison (see
`message.py`) and becomes NaN everywhere, as it would in float32, instead of an error on one rank alone.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.channel import Channel, Steps, Timings, finish
from laconic.exchange.message import Writer, max_nbytes, unpack
from laconic.exchange.pieces import CodedStep, Encoding, Parcel, Piece, PlanKey, coded_program
from laconic.schedules.registry import build
from laconic.transports.base import Call, Incoming, Outgoing, Transport

_EXACT = codec("none")
_IDLE = CodedStep()
SMALL = 1 / 16  # of all values, times the world size: an exact channel up to this is sent whole


def run_coded(
    channels: Sequence[Channel],
    transport: Transport,
    *,
    algorithm: str = "direct",
    hosts: tuple[int, ...] | None = None,
    step: int = 0,
) -> Timings:
    """Sum every channel's buffer over all ranks, in place, through its codec, by one schedule for all channels.

    Args:
        algorithm: any all-reduce algorithm; direct and hierarchical encode twice whatever P.
        hosts: the host of each rank, to leave messages inside a host in float32; None compresses all.
        step: draws of stochastic codecs differ by step, rank and round.
    """
    return CodedExchange(channels, transport, algorithm=algorithm, hosts=hosts).run(step)


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
    recvs: tuple[Incoming, ...]
    arrivals: tuple[tuple[_Part, ...], ...]  # what each of recvs holds


class CodedExchange:
    """The plan and the memory of a compressed all-reduce of these channels, kept from step to step.

    Args:
        channels: what is summed; their buffers may be replaced by others of the same length before every `run`.
        algorithm, hosts: as for `run_coded`.
        divisor: what the sums are divided by, for means.
    """

    def __init__(
        self,
        channels: Sequence[Channel],
        transport: Transport,
        *,
        algorithm: str,
        hosts: tuple[int, ...] | None = None,
        divisor: int = 1,
    ) -> None:
        self.channels = list(channels)
        self.transport = transport
        self.algorithm = algorithm
        self.divisor = divisor
        self.numel = sum(channel.buffer.numel() for channel in channels)
        self.detail = " and ".join(f"{channel.buffer.numel()} through {channel.codec}" for channel in channels)
        parameters = {"hosts": hosts} if algorithm == "hierarchical" and hosts is not None else {}
        size, rank = transport.world_size, transport.rank
        self.whole = self._whole_channels()
        schedules = [build("all_reduce", algorithm, size, channel.buffer.numel(), **parameters) for channel in channels]
        programs = [
            _to_all(plan.numel, rank, size) if channel in self.whole else coded_program(PlanKey(plan, rank, hosts))
            for channel, plan in enumerate(schedules)
        ]
        rounds = max((schedule.rounds for schedule in schedules), default=0)
        self.rounds = [self._plan([program.get(number, _IDLE) for program in programs]) for number in range(rounds)]
        self._payloads: dict[tuple[int, Piece], Tensor | None] = {}  # of this run; None: poisoned
        self._gathered: dict[int, dict[int, Tensor | None]] = {i: {} for i in self.whole}  # by channel and rank

    def _whole_channels(self) -> set[int]:
        """The small exact channels, which `direct` sends whole to everyone in its first round: fewer calls."""
        if self.algorithm != "direct" or self.transport.world_size == 1:
            return set()
        few = self.numel * SMALL / self.transport.world_size
        return {
            i
            for i, channel in enumerate(self.channels)
            if channel.codec == _EXACT and 0 < channel.buffer.numel() <= few
        }

    def _plan(self, steps: list[CodedStep]) -> _Round:
        """One round of all channels."""
        fresh = [{encoding.piece: encoding for encoding in step.encodings} for step in steps]
        peers: dict[tuple[_Part, ...], list[int]] = {}
        for peer, parcels in _by_peer([step.sends for step in steps]):
            parts = tuple(
                _Part(channel, piece, self._coder(channel, piece), parcel.add, fresh[channel].get(piece))
                for channel, parcel in parcels
                for piece in parcel.pieces
            )
            peers.setdefault(parts, []).append(peer)
        messages = [
            _Message(tuple(to), parts, Writer([part.max_nbytes for part in parts])) for parts, to in peers.items()
        ]
        recvs, arrivals = [], []
        for peer, parcels in _by_peer([step.recvs for step in steps]):
            parts = tuple(
                _Part(channel, piece, self._coder(channel, piece), parcel.add)
                for channel, parcel in parcels
                for piece in parcel.pieces
            )
            most = max_nbytes([part.max_nbytes for part in parts])
            memory = torch.empty(most, dtype=torch.uint8)
            recvs.append(Incoming(peer, most, torch.uint8, memory.device, into=memory, at_most=True))
            arrivals.append(parts)
        return _Round(tuple(messages), tuple(recvs), tuple(arrivals))

    def _coder(self, channel: int, piece: Piece) -> Codec:
        return _EXACT if piece.exact else self.channels[channel].codec

    def run(self, step: int = 0) -> Timings:
        """Sum the channels' buffers over all ranks; draws of stochastic codecs differ by step, rank and round."""
        return finish(self.steps(step))

    def steps(self, step: int = 0) -> Steps:
        """As `run`, pausing whenever there is nothing to do but wait."""
        timings, transport = Timings(), self.transport
        for channel in self.channels:
            channel.carry()
        self._payloads.clear()
        call = transport.begin("all_reduce", self.algorithm, self.numel, "float32", self.detail, len(self.rounds))
        for number, round_ in enumerate(self.rounds):
            if round_.messages or round_.recvs:
                yield from self._run_round(number, round_, step, timings, call)
        transport.end()
        if self.divisor != 1:
            for channel in self.channels:
                channel.buffer.div_(self.divisor)
        return timings

    def _run_round(
        self, number: int, round_: _Round, step: int, timings: Timings, call: Call
    ) -> Generator[None, None, None]:
        begun, posting_s = time.perf_counter(), 0.0
        draws = (step * len(self.rounds) + number) * self.transport.world_size
        early = self.transport.interleaves  # then a message leaves while the next is encoded
        posts = [self.transport.post([], round_.recvs, number)] if early else []
        sends: list[Outgoing] = []
        encoded: set[tuple[int, Piece]] = set()
        for message in round_.messages:
            data = self._write(message, number, draws, encoded)
            sends += [Outgoing(peer, data) for peer in message.peers]
            if early:
                written = time.perf_counter()
                posts.append(self.transport.post(sends[-len(message.peers) :], [], number))
                posting_s += time.perf_counter() - written
        now = time.perf_counter()
        timings.encode_s += now - begun - posting_s
        timings.sent_nbytes += sum(send.data.nbytes for send in sends)
        timings.messages += len(sends)

        if not early:
            posts.append(self.transport.post(sends, round_.recvs, number))
        posted = posts[0]
        timings.wait_s += time.perf_counter() - now + posting_s
        yield
        self.transport.resume(call)
        now = time.perf_counter()
        for index, (incoming, parts) in enumerate(zip(round_.recvs, round_.arrivals, strict=True)):
            data = posted.received(index)
            arrived = time.perf_counter()
            self._take(incoming, parts, data, number)
            timings.wait_s += arrived - now
            now = time.perf_counter()
            timings.decode_s += now - arrived
        for each in posts:
            each.sent()
        timings.wait_s += time.perf_counter() - now
        self.transport.counters.rounds += 1
        if number == 0:
            self._add_whole()

    def _write(self, message: _Message, number: int, draws: int, encoded: set[tuple[int, Piece]]) -> Tensor:
        """Encode the pieces of a message, each where it lies; those that another message or round had are copied."""
        writer = message.writer
        writer.begin()
        for part in message.parts:
            key = (part.channel, part.piece)
            if part.encoding is not None and key not in encoded:
                self._payloads[key] = self._encode(part, part.encoding, number, draws, writer.room())
                encoded.add(key)
            writer.add(self._payloads[key])
        return writer.finish()

    def _encode(self, part: _Part, encoding: Encoding, number: int, draws: int, room: Tensor) -> Tensor | None:
        channel, piece, coder = self.channels[part.channel], part.piece, part.coder
        values = channel.buffer[piece.start : piece.stop]
        draws += encoding.stream
        try:
            if channel.residual is None or piece.exact:
                payload = coder.encode(values, step=draws, out=room)
            else:
                site = (number, piece.start, piece.stop)
                payload = channel.residual.encode(coder, values, site, step=draws, out=room, copies=encoding.copies)
        except NonFiniteError:
            if encoding.adopt:
                values.fill_(float("nan"))
            return None
        if encoding.adopt:
            coder.decode(payload, values.numel(), out=values)
        return payload

    def _take(self, incoming: Incoming, parts: tuple[_Part, ...], data: Tensor, number: int) -> None:
        """Decode what came into its slices; payloads that a later round may pass on are kept."""
        try:
            payloads, nbytes = unpack(data, len(parts))
            for part, payload in zip(parts, payloads, strict=True):
                piece = part.piece
                values = self.channels[part.channel].buffer[piece.start : piece.stop]
                if part.channel in self.whole:
                    self._gathered[part.channel][incoming.peer] = payload
                elif payload is None:
                    values.fill_(float("nan"))
                elif part.add:
                    part.coder.decode_add(payload, values)
                else:
                    part.coder.decode(payload, values.numel(), out=values)
                if not part.add:
                    self._payloads[part.channel, piece] = self._kept(incoming, payload, data, number)
        except PayloadError as error:
            where = self.transport.where(number)
            raise PayloadError(f"{where}: peer {incoming.peer} sent a bad payload: {error}") from error
        self.transport.counters.count_received(incoming.peer, nbytes)

    def _add_whole(self) -> None:
        """Sum what everyone sent of the whole channels, in order of rank: the same bits everywhere."""
        for index in self.whole:
            channel, parts = self.channels[index], self._gathered[index]
            parts[self.transport.rank] = self._payloads[index, Piece(0, channel.buffer.numel(), True)]
            for rank in range(self.transport.world_size):
                payload = parts[rank]
                try:
                    if payload is None:
                        channel.buffer.fill_(float("nan"))
                    elif rank == 0:
                        _EXACT.decode(payload, channel.buffer.numel(), out=channel.buffer)
                    else:
                        _EXACT.decode_add(payload, channel.buffer)
                except PayloadError as error:
                    where = self.transport.where(0)
                    raise PayloadError(f"{where}: peer {rank} sent a bad payload: {error}") from error

    def _kept(self, incoming: Incoming, payload: Tensor | None, data: Tensor, number: int) -> Tensor | None:
        """A payload that a later round may pass on: copied where it lies in the engine's memory, not in ours."""
        ours = incoming.into is not None and data.data_ptr() == incoming.into.data_ptr()
        return payload if payload is None or ours or number + 1 == len(self.rounds) else payload.clone()


def _to_all(numel: int, rank: int, world_size: int) -> dict[int, CodedStep]:
    """A channel that is sent whole to everyone in the first round."""
    piece = Piece(0, numel, True)
    others = [(rank + hop) % world_size for hop in range(1, world_size)]
    parcels = tuple(Parcel(peer, (piece,), True) for peer in others)
    return {0: CodedStep((Encoding(piece, False, rank),), parcels, parcels)}


def _by_peer(parcels: Iterable[tuple[Parcel, ...]]) -> list[tuple[int, list[tuple[int, Parcel]]]]:
    """The parcels of all channels that go to, or come from, each peer: the k-th of every channel in one message."""
    groups: dict[tuple[int, int], list[tuple[int, Parcel]]] = {}
    for channel, row in enumerate(parcels):
        seen: dict[int, int] = {}
        for parcel in row:
            turn = seen[parcel.peer] = seen.get(parcel.peer, -1) + 1
            groups.setdefault((turn, parcel.peer), []).append((channel, parcel))
    return [(peer, parts) for (_, peer), parts in groups.items()]
