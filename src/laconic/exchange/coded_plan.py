"""Plan a compressed collective: which rank encodes which slice, and what each message holds.

Caller: `coded.py`, which plans once and runs every step. In the adding half of a schedule every send encodes what the
sender holds. In the copying half a slice is encoded once, by its owner, and then travels as the same bytes: a rank that
passes it on forwards the payload, and the owner itself adopts what the payload decodes to. So all ranks end with the
same bits.

Sums that several ranks have computed alike (after a butterfly) cannot be encoded by one of them alone; they are passed
on in float32.

A *piece* is a slice with one payload. Every rank computes the pieces of all ranks from the message table, so that
sender and receiver agree without communication.

Whole channels are the one exchange without a schedule: their payloads are added in the order of ranks once all have
arrived, whereas a schedule adds each on arrival.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from laconic.codecs import Codec
from laconic.codecs.casts import NoneCodec
from laconic.codecs.selector import Sparse
from laconic.errors import ScheduleError
from laconic.schedules.registry import build
from laconic.schedules.schedule import Schedule

GATHER = "gather"  # every rank sends its whole payload to every other
EXACT = NoneCodec()
SMALL = 1 / 16  # of all values, times the world size: a cast's channel up to this is sent whole
SEGMENT_NBYTES = 4 << 20  # of payload: what is under way at once, up to four exchanges of this, sent and received
Slice = tuple[int, int]


class Piece(NamedTuple):
    """A slice that travels as one payload; exact if it stays inside a host or all ranks have it already."""

    start: int
    stop: int
    exact: bool


@dataclass(frozen=True)
class Encoding:
    """Encode a piece before the sends of its round.

    `adopt`: the sender replaces the slice by what the payload decodes to. `stream`: ranks that encode the same sum draw
    the same random numbers; others draw their own. `copies`: how many ranks encode the same sum of this piece, each
    keeping the same residual.
    """

    piece: Piece
    adopt: bool
    stream: int
    copies: int = 1


@dataclass(frozen=True)
class Parcel:
    """The pieces one message carries, in order."""

    peer: int
    pieces: tuple[Piece, ...]
    add: bool


@dataclass(frozen=True)
class CodedStep:
    """One round of one rank: encode, send (payloads made now or received earlier), receive."""

    encodings: tuple[Encoding, ...] = ()
    sends: tuple[Parcel, ...] = ()
    recvs: tuple[Parcel, ...] = ()


Program = dict[int, CodedStep]  # by round; a rank that does nothing in a round has none


def in_segments(numel: int, count: int, program: Callable[[int], tuple[Program, int]]) -> tuple[Program, int]:
    """A vector in `count` segments, one after the other: its rounds, and how many there are.

    `program` gives them for a vector of a length.
    """
    merged: Program = {}
    rounds = 0
    for part in range(count):
        start, stop = part * numel // count, (part + 1) * numel // count
        steps, taken = program(stop - start)
        merged |= {rounds + number: _moved(step, start) for number, step in steps.items()}
        rounds += taken
    return merged, rounds


def _moved(step: CodedStep, by: int) -> CodedStep:
    """The same round of a slice that lies `by` values further on."""

    def piece(old: Piece) -> Piece:
        return Piece(old.start + by, old.stop + by, old.exact)

    def parcels(old: tuple[Parcel, ...]) -> tuple[Parcel, ...]:
        return tuple(replace(parcel, pieces=tuple(map(piece, parcel.pieces))) for parcel in old)

    encodings = tuple(replace(encoding, piece=piece(encoding.piece)) for encoding in step.encodings)
    return CodedStep(encodings, parcels(step.sends), parcels(step.recvs))


def held_after(rounds: Sequence[Sequence[CodedStep]]) -> set[int]:
    """The rounds after which a payload must still be forwarded; each round is a step of every channel."""
    known: dict[tuple[int, Piece], int] = {}  # the round that a payload is from
    held: set[int] = set()
    for number, steps in enumerate(rounds):
        for channel, step in enumerate(steps):
            known.update({(channel, encoding.piece): number for encoding in step.encodings})
            for piece in (piece for parcel in step.sends for piece in parcel.pieces):
                held.update(range(known[channel, piece], number))
            came = (piece for parcel in step.recvs if not parcel.add for piece in parcel.pieces)
            known.update({(channel, piece): number for piece in came})
    return held


@functools.lru_cache(maxsize=128)
def coded_program(schedule: Schedule, me: int, hosts: tuple[int, ...] | None) -> Program:
    """The rounds of rank `me`, by number; the codec serves ranks of different hosts (all ranks when hosts is None)."""
    m = schedule.messages
    held: list[set[Piece]] = [set() for _ in range(schedule.world_size)]  # payloads each rank can pass on
    alike: list[list[Slice]] = [[] for _ in range(schedule.world_size)]  # sums that other ranks computed too
    stream = list(range(schedule.world_size))  # the smallest rank that holds the same sum
    steps: Program = {}
    for number, rows in _by_round(schedule):
        encodings: dict[tuple[int, Piece], Encoding] = {}
        sends: list[Parcel] = []
        recvs: list[Parcel] = []
        arrivals: list[tuple[int, Piece]] = []
        joined = list(stream)
        for row in rows:
            src, dst, start, stop = int(m.src[row]), int(m.dst[row]), int(m.start[row]), int(m.stop[row])
            if int(m.at[row]) != start:
                raise ScheduleError(f"{schedule.algorithm}: a codec cannot serve a schedule that moves slices")
            exact = hosts is not None and hosts[src] == hosts[dst]
            if bool(m.add[row]):
                pieces: tuple[Piece, ...] = (Piece(start, stop, exact),)
                adopt = not exact and _is_added_to(schedule, rows, src, start, stop)
                copies = stream.count(stream[src])
                encodings[src, pieces[0]] = Encoding(pieces[0], adopt, stream[src], copies)
                if adopt:
                    alike[src].append((start, stop))
                    joined[src] = min(joined[src], stream[dst])
            else:
                exact = exact or any(a < stop and start < b for a, b in alike[src])
                pieces, fresh = _tiles(held[src], start, stop, exact)
                for piece in fresh:
                    encodings[src, piece] = Encoding(piece, not exact, stream[src])
                arrivals += [(src, piece) for piece in fresh] + [(dst, piece) for piece in pieces]
            if src == me:
                sends.append(Parcel(dst, pieces, bool(m.add[row])))
            if dst == me:
                recvs.append(Parcel(src, pieces, bool(m.add[row])))
        stream = joined
        for rank, piece in arrivals:
            held[rank].add(piece)
        mine = tuple(encoding for (rank, _), encoding in encodings.items() if rank == me)
        if mine or sends or recvs:
            steps[number] = CodedStep(mine, tuple(sends), tuple(recvs))
    return steps


def _by_round(schedule: Schedule) -> list[tuple[int, list[int]]]:
    rounds = schedule.messages.round
    groups: dict[int, list[int]] = {}
    for row in np.argsort(rounds, kind="stable").tolist():
        groups.setdefault(int(rounds[row]), []).append(row)
    return list(groups.items())


def _is_added_to(schedule: Schedule, rows: list[int], rank: int, start: int, stop: int) -> bool:
    """Whether `rank` adds something into [start, stop) in this round: then both sides must add decoded values."""
    m = schedule.messages
    return any(
        int(m.dst[row]) == rank and bool(m.add[row]) and int(m.start[row]) < stop and start < int(m.stop[row])
        for row in rows
    )


def _tiles(held: set[Piece], start: int, stop: int, exact: bool) -> tuple[tuple[Piece, ...], list[Piece]]:
    """[start, stop) as pieces: those held as payloads, and the gaps between them, which are new."""
    inside = sorted((p.start, p.stop) for p in held if p.exact == exact and p.start < stop and start < p.stop)
    pieces: list[Piece] = []
    fresh: list[Piece] = []
    at = start
    for a, b in [*inside, (stop, stop)]:
        if a < at or b > stop:
            raise ScheduleError("a piece that was encoded whole would have to be sent in part")
        if a > at:
            fresh.append(Piece(at, a, exact))
            pieces.append(fresh[-1])
        if b > a:
            pieces.append(Piece(a, b, exact))
        at = b
    return tuple(pieces), fresh


@dataclass(frozen=True)
class Part:
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
class PlannedRound:
    """The messages that this rank sends and receives in one round; equal messages are sent as the same bytes."""

    sends: tuple[tuple[tuple[int, ...], tuple[Part, ...]], ...]
    recvs: tuple[tuple[int, tuple[Part, ...]], ...]


@dataclass(frozen=True)
class CodedPlan:
    """One rank's rounds.

    Attributes:
        held: the rounds after which a payload must still be forwarded.
        whole: the channels that go whole to everyone, in the first round of each of their segments.
    """

    rounds: tuple[PlannedRound, ...]
    held: frozenset[int]
    whole: frozenset[int]


def plan_rounds(
    numels: Sequence[int],
    coders: Sequence[Codec],
    place: tuple[int, int],
    collective: str,
    algorithm: str,
    hosts: tuple[int, ...] | None,
) -> CodedPlan:
    """The rounds of channels with these lengths and codecs, on the rank and of the world size that `place` names."""
    rank, size = place
    whole = _whole_channels(numels, coders, algorithm, size) if collective == "all_reduce" else frozenset()
    parameters = {"hosts": hosts} if algorithm == "hierarchical" and hosts is not None else {}

    def program(index: int, numel: int) -> tuple[Program, int]:
        if algorithm == GATHER:
            return _to_all(numel, rank, size, exact=False), 1
        schedule = build(collective, algorithm, size, numel, **parameters)
        if index in whole:
            return _to_all(numel, rank, size, exact=coders[index].exact), schedule.rounds
        return coded_program(schedule, rank, hosts), schedule.rounds

    found = [
        in_segments(numel, _segments(coder, numel) if collective == "all_reduce" else 1, functools.partial(program, i))
        for i, (numel, coder) in enumerate(zip(numels, coders, strict=True))
    ]
    count = max((rounds for _, rounds in found), default=0)
    steps = [[each.get(number, CodedStep()) for each, _ in found] for number in range(count)]
    return CodedPlan(tuple(_planned(each, coders, rank) for each in steps), frozenset(held_after(steps)), whole)


def _whole_channels(numels: Sequence[int], coders: Sequence[Codec], algorithm: str, size: int) -> frozenset[int]:
    """The channels that go whole to everyone: all of `gather`, of `direct` the small casts, to spare calls."""
    if algorithm == GATHER:
        return frozenset(range(len(numels)))
    if algorithm != "direct" or size == 1:
        return frozenset()
    few = sum(numels) * SMALL / size
    casts = (i for i, coder in enumerate(coders) if coder.fine)
    return frozenset(i for i in casts if 0 < numels[i] <= few)


def _segments(coder: Codec, numel: int) -> int:
    """The number of segments of a channel; a selector needs all values at once, and its payload is small."""
    return 1 if isinstance(coder, Sparse) else max(1, -(-coder.max_nbytes(numel) // SEGMENT_NBYTES))


def _to_all(numel: int, rank: int, world_size: int, *, exact: bool) -> Program:
    """A channel that is sent whole to everyone in the first round."""
    piece = Piece(0, numel, exact)
    others = [(rank + hop) % world_size for hop in range(1, world_size)]
    parcels = tuple(Parcel(peer, (piece,), True) for peer in others)
    return {0: CodedStep((Encoding(piece, False, rank),), parcels, parcels)}


def _planned(steps: Sequence[CodedStep], coders: Sequence[Codec], rank: int) -> PlannedRound:
    """One round of all channels."""
    fresh = [{encoding.piece: encoding for encoding in step.encodings} for step in steps]
    peers: dict[tuple[Part, ...], list[int]] = {}
    for peer, parcels in _by_peer([step.sends for step in steps]):
        peers.setdefault(_parts(parcels, coders, fresh), []).append(peer)
    if not peers and any(fresh):  # a rank alone gathers what it has encoded itself
        alone = [(i, Parcel(rank, (piece,), True)) for i, row in enumerate(fresh) for piece in row]
        peers[_parts(alone, coders, fresh)] = []
    recvs = [(peer, _parts(parcels, coders)) for peer, parcels in _by_peer([step.recvs for step in steps])]
    return PlannedRound(tuple((tuple(to), parts) for parts, to in peers.items()), tuple(recvs))


def _parts(
    parcels: Sequence[tuple[int, Parcel]], coders: Sequence[Codec], fresh: Sequence[dict[Piece, Encoding]] = ()
) -> tuple[Part, ...]:
    """What one message holds; `fresh` are the encodings of its round, by channel, where it is sent."""
    return tuple(
        Part(
            channel,
            piece,
            EXACT if piece.exact else coders[channel],
            parcel.add,
            fresh[channel].get(piece) if fresh else None,
        )
        for channel, parcel in parcels
        for piece in parcel.pieces
    )


def _by_peer(parcels: Iterable[tuple[Parcel, ...]]) -> list[tuple[int, list[tuple[int, Parcel]]]]:
    """The parcels of all channels that go to, or come from, each peer: the k-th of every channel in one message."""
    groups: dict[tuple[int, int], list[tuple[int, Parcel]]] = {}
    for channel, row in enumerate(parcels):
        seen: dict[int, int] = {}
        for parcel in row:
            turn = seen[parcel.peer] = seen.get(parcel.peer, -1) + 1
            groups.setdefault((turn, parcel.peer), []).append((channel, parcel))
    return [(peer, parts) for (_, peer), parts in groups.items()]
