"""Which slices of a schedule are encoded where: the plan of a compressed collective.

Callers: `coded.py`. In the adding half of a schedule every send encodes what the sender holds. In the copying half a
slice is encoded once, by its owner, and then travels as the same bytes: a rank that passes it on forwards the payload,
and the owner itself adopts what the payload decodes to. So all ranks end with the same bits.

Sums that several ranks have computed alike (after a butterfly) cannot be encoded by one of them alone; they are passed
on in float32.

A *piece* is a slice with one payload. Pieces are worked out for all ranks at once from the message table, so that
sender and receiver agree on them without a word.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from laconic.errors import ScheduleError
from laconic.schedules.schedule import Schedule

Slice = tuple[int, int]


class Piece(NamedTuple):
    """A slice that travels as one payload; exact where it stays inside a host or is already everyone's."""

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
    """The rounds, each a step of every channel, after which a payload is still to be passed on."""
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
