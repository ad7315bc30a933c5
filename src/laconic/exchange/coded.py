"""A compressed all-reduce over any schedule: encode per slice, decode_add into float32, feedback on every leg.

Callers: `collectives.all_reduce(codec=…)` and the DDP hook.

    direct        two encodings whatever P: the contribution to each chunk, and each chunk's sum
    hierarchical  float32 inside a host, the codec between hosts
    ring          one encoding a hop: the error grows with P
    butterfly     one encoding a level; both partners add decoded values, so they agree

Several *lanes* (say, the weights through a codec and the biases exactly) share the messages of one run: small messages
are what slow engines charge for. A piece that holds NaN or infinity travels as poison (see `message.py`) and becomes
NaN everywhere, as it would in float32, instead of an error on one rank alone.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from laconic.codecs import Codec, codec
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.feedback import Feedback
from laconic.exchange.message import aligned, head_nbytes, pack, unpack
from laconic.exchange.pieces import CodedStep, Encoding, Parcel, Piece, PlanKey, coded_program
from laconic.schedules.registry import build
from laconic.transports.base import Incoming, Outgoing, Transport

_EXACT = codec("none")


@dataclass
class Timings:
    """Where the time of an exchange went, in seconds, and what was sent."""

    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    sent_nbytes: int = 0
    messages: int = 0


@dataclass
class Lane:
    """A float32 buffer, its codec, and what is kept for it from step to step.

    Attributes:
        feedback: the residuals; None feeds nothing back.
        workspace: the payloads' buffers, kept under (round, slice).
    """

    buffer: Tensor
    codec: Codec
    feedback: Feedback | None = None
    workspace: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)

    def room(self, number: int, piece: Piece, nbytes: int) -> Tensor:
        """A uint8 buffer for the payload of `piece` in round `number`."""
        key = (number, piece.start, piece.stop)
        found = self.workspace.get(key)
        if found is None or found.numel() < nbytes:
            found = self.workspace[key] = torch.empty(nbytes, dtype=torch.uint8)
        return found


def run_coded(
    lanes: Sequence[Lane],
    transport: Transport,
    *,
    algorithm: str = "direct",
    hosts: tuple[int, ...] | None = None,
    step: int = 0,
) -> Timings:
    """Sum every lane's buffer over all ranks, in place, through its codec, by one schedule for all lanes.

    Args:
        algorithm: any all-reduce algorithm; direct and hierarchical encode twice whatever P.
        hosts: the host of each rank, to leave messages inside a host in float32; None compresses all.
        step: draws of stochastic codecs differ by step, rank and round.
    """
    return _CodedRun(list(lanes), transport, algorithm, hosts, step).run()


class _CodedRun:
    def __init__(
        self, lanes: list[Lane], transport: Transport, algorithm: str, hosts: tuple[int, ...] | None, step: int
    ) -> None:
        self.lanes = lanes
        self.transport = transport
        self.algorithm = algorithm
        self.step = step
        self.timings = Timings()
        parameters = {"hosts": hosts} if algorithm == "hierarchical" and hosts is not None else {}
        size = transport.world_size
        schedules = [build("all_reduce", algorithm, size, lane.buffer.numel(), **parameters) for lane in lanes]
        self.rounds = max((schedule.rounds for schedule in schedules), default=0)
        self.programs = [coded_program(PlanKey(schedule, transport.rank, hosts)) for schedule in schedules]
        self.payloads: list[dict[Piece, Tensor | None]] = [{} for _ in lanes]  # None: poisoned

    def run(self) -> Timings:
        transport = self.transport
        for lane in self.lanes:
            owed = lane.feedback.take_owed() if lane.feedback is not None else None
            if owed is not None:
                lane.buffer += owed
        detail = " and ".join(f"{lane.buffer.numel()} through {lane.codec}" for lane in self.lanes)
        numel = sum(lane.buffer.numel() for lane in self.lanes)
        transport.begin("all_reduce", self.algorithm, numel, "float32", detail, self.rounds)
        for number in range(self.rounds):
            self._run_round(number, [program.get(number, CodedStep()) for program in self.programs])
        transport.end()
        return self.timings

    def _run_round(self, number: int, steps: list[CodedStep]) -> None:
        begun = time.perf_counter()
        for index, step in enumerate(steps):
            for encoding in step.encodings:
                self._encode(index, number, encoding)
        sends = self._outgoing(_by_peer(steps, "sends"))
        arrivals = _by_peer(steps, "recvs")
        if not sends and not arrivals:
            return
        recvs = [self._incoming(peer, parcels) for peer, parcels in arrivals]
        self.timings.encode_s += time.perf_counter() - begun

        posted = self.transport.post(sends, recvs, number)
        for index, (peer, parcels) in enumerate(arrivals):
            begun = time.perf_counter()
            data = posted.received(index)
            arrived = time.perf_counter()
            self._take(peer, parcels, data, number)
            self.timings.wait_s += arrived - begun
            self.timings.decode_s += time.perf_counter() - arrived
        begun = time.perf_counter()
        posted.sent()
        self.timings.wait_s += time.perf_counter() - begun
        self.timings.sent_nbytes += sum(send.data.nbytes for send in sends)
        self.timings.messages += len(sends)
        self.transport.counters.rounds += 1

    def _encode(self, index: int, number: int, encoding: Encoding) -> None:
        lane, piece = self.lanes[index], encoding.piece
        values = lane.buffer[piece.start : piece.stop]
        coder = _EXACT if piece.exact else lane.codec
        out = lane.room(number, piece, coder.max_nbytes(values.numel()))
        draws = (self.step * self.rounds + number) * self.transport.world_size + encoding.stream
        try:
            if lane.feedback is None or piece.exact:
                payload = coder.encode(values, step=draws, out=out)
            else:
                site = (number, piece.start, piece.stop)
                payload = lane.feedback.encode(coder, values, site, step=draws, out=out)
        except NonFiniteError:
            self.payloads[index][piece] = None
            if encoding.adopt:
                values.fill_(float("nan"))
            return
        self.payloads[index][piece] = payload
        if encoding.adopt:
            coder.decode(payload, values.numel(), out=values)

    def _outgoing(self, parcels: list[tuple[int, list[tuple[int, Parcel]]]]) -> list[Outgoing]:
        """One message a peer; peers that get the same pieces get the same message."""
        made: dict[tuple[tuple[int, Piece], ...], Tensor] = {}
        sends = []
        for peer, parts in parcels:
            pieces = tuple((index, piece) for index, parcel in parts for piece in parcel.pieces)
            if pieces not in made:
                made[pieces] = pack([self.payloads[index][piece] for index, piece in pieces])
            sends.append(Outgoing(peer, made[pieces]))
        return sends

    def _incoming(self, peer: int, parts: list[tuple[int, Parcel]]) -> Incoming:
        sizes = [
            (_EXACT if piece.exact else self.lanes[index].codec).max_nbytes(piece.stop - piece.start)
            for index, parcel in parts
            for piece in parcel.pieces
        ]
        most = head_nbytes(len(sizes)) + sum(map(aligned, sizes))
        return Incoming(peer, most, torch.uint8, torch.device("cpu"), at_most=True)

    def _take(self, peer: int, parts: list[tuple[int, Parcel]], data: Tensor, number: int) -> None:
        """Decode what came into its slices; keep copied payloads that a later round passes on."""
        try:
            pieces = [(index, parcel.add, piece) for index, parcel in parts for piece in parcel.pieces]
            payloads, nbytes = unpack(data, len(pieces))
            for (index, add, piece), payload in zip(pieces, payloads, strict=True):
                lane = self.lanes[index]
                coder = _EXACT if piece.exact else lane.codec
                values = lane.buffer[piece.start : piece.stop]
                if payload is None:
                    values.fill_(float("nan"))
                elif add:
                    coder.decode_add(payload, values)
                else:
                    coder.decode(payload, values.numel(), out=values)
                if not add:
                    self.payloads[index][piece] = self._kept(lane, piece, payload, number)
        except PayloadError as error:
            where = self.transport.where(number)
            raise PayloadError(f"{where}: peer {peer} sent a bad payload: {error}") from error
        self.transport.counters.count_received(peer, nbytes)

    def _kept(self, lane: Lane, piece: Piece, payload: Tensor | None, number: int) -> Tensor | None:
        """A payload that may be passed on: copied, for the engine reuses its memory; not copied in the last round."""
        if payload is None or number + 1 == self.rounds:
            return payload
        return lane.room(number, piece, payload.numel())[: payload.numel()].copy_(payload)


def _by_peer(steps: list[CodedStep], what: str) -> list[tuple[int, list[tuple[int, Parcel]]]]:
    """The parcels of all lanes that go to, or come from, each peer: the k-th of every lane in one message."""
    groups: dict[tuple[int, int], list[tuple[int, Parcel]]] = {}
    for index, step in enumerate(steps):
        seen: dict[int, int] = {}
        for parcel in getattr(step, what):
            turn = seen[parcel.peer] = seen.get(parcel.peer, -1) + 1
            groups.setdefault((turn, parcel.peer), []).append((index, parcel))
    return [(peer, parts) for (_, peer), parts in groups.items()]
