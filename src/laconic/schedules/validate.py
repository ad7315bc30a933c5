"""Proves a schedule right: ranges, ambiguity, and the result by symbolic execution.

A symbolic value is a vector of counts, "how often does rank c's value at place s stand in this sum". Running the
schedule on counts instead of numbers shows double or missing contributions that numbers could hide.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from laconic.errors import ScheduleError
from laconic.schedules.schedule import Ints, Schedule, bounds

# The symbolic state has ranks × places × contributors entries; past this it would not fit in memory.
MAX_SYMBOLS = 2**28


def validate(schedule: Schedule) -> Schedule:
    """Check ranges, ambiguity and, by symbolic execution, the result; returns the schedule.

    Raises:
        ScheduleError: naming the first rank, round and slice that is wrong.
    """
    check_size(schedule.world_size, fewest_places(schedule.world_size, schedule.numel))
    _check_ranges(schedule)
    _check_ambiguity(schedule)
    _check_result(schedule)
    return schedule


def fewest_places(world_size: int, numel: int) -> int:
    """In how many places any schedule cuts the buffer at least: one for each rank's share."""
    return min(world_size, numel)


def check_size(world_size: int, places: int, moves: bool = False) -> None:
    """Refuse what is too large to execute."""
    symbols = world_size * (places if moves else 1)
    if world_size * places * symbols > MAX_SYMBOLS:
        raise ScheduleError(
            f"{world_size} ranks and {places} pieces are too many to execute symbolically, which is how a schedule is "
            "proved right; fewer ranks show the same pattern"
        )


def _check_ranges(schedule: Schedule) -> None:
    m, world_size = schedule.messages, schedule.world_size
    length = m.stop - m.start
    wrong = (
        (m.round < 0)
        | (np.minimum(m.src, m.dst) < 0)
        | (np.maximum(m.src, m.dst) >= world_size)
        | (m.src == m.dst)
        | (np.minimum(m.start, m.at) < 0)
        | (length <= 0)
        | (np.maximum(m.stop, m.at + length) > schedule.numel)
    )
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        raise ScheduleError(
            f"round {m.round[row]}: the message from rank {m.src[row]} to rank {m.dst[row]} of values "
            f"{m.start[row]}:{m.stop[row]} into {m.at[row]}:{m.at[row] + length[row]} does not fit a world of "
            f"{world_size} ranks with {schedule.numel} values"
        )


def _check_ambiguity(schedule: Schedule) -> None:
    """A copy may not overlap another receive of its rank and round: the result would depend on the order."""
    m = schedule.messages
    order = np.lexsort((m.at, m.dst, m.round))
    end = (m.at + m.stop - m.start)[order]
    at, dst, round_, add = m.at[order], m.dst[order], m.round[order], m.add[order]
    furthest, furthest_copy, group = -1, -1, (-1, -1)
    for i in range(len(order)):
        if (int(round_[i]), int(dst[i])) != group:
            furthest, furthest_copy, group = -1, -1, (int(round_[i]), int(dst[i]))
        if at[i] < (furthest if not add[i] else furthest_copy):
            raise ScheduleError(
                f"round {group[0]}: rank {group[1]} receives twice into values from {at[i]} on, one of them a copy; "
                "the result would depend on the order"
            )
        furthest = max(furthest, int(end[i]))
        furthest_copy = furthest_copy if add[i] else max(furthest_copy, int(end[i]))


def _places(schedule: Schedule) -> Ints:
    """Cut the buffer where any message begins or ends, until every message maps whole pieces onto whole pieces."""
    m = schedule.messages
    length = m.stop - m.start
    ends = (m.start, m.stop, m.at, m.at + length, bounds(schedule.numel, schedule.world_size))
    cuts = np.unique(np.concatenate(ends))
    moved = np.flatnonzero(m.start != m.at)
    while True:
        more = [cuts]
        for row in moved.tolist():
            shift, a, b = m.at[row] - m.start[row], m.start[row], m.stop[row]
            more.append(cuts[(cuts > a) & (cuts < b)] + shift)
            more.append(cuts[(cuts > a + shift) & (cuts < b + shift)] - shift)
        finer = np.unique(np.concatenate(more))
        if len(finer) == len(cuts):
            return cuts
        cuts = finer


def _initial(schedule: Schedule, cuts: Ints, moves: bool) -> npt.NDArray[np.int32]:
    """Every rank begins with its own value everywhere: counts[rank, place, contributor (and its place)]."""
    world_size, places = schedule.world_size, len(cuts) - 1
    check_size(world_size, places, moves)
    symbols = world_size * (places if moves else 1)
    counts = np.zeros((world_size, places, symbols), dtype=np.int32)
    for rank in range(world_size):
        for place in range(places):
            counts[rank, place, rank * places + place if moves else rank] = 1
    return counts


def _check_result(schedule: Schedule) -> None:
    if schedule.numel == 0:
        return
    m = schedule.messages
    moves = bool((m.start != m.at).any()) or schedule.collective == "all_to_all"
    cuts = _places(schedule)
    counts = _initial(schedule, cuts, moves)
    begin, finish = np.searchsorted(cuts, m.start), np.searchsorted(cuts, m.stop)
    into = np.searchsorted(cuts, m.at)
    order = np.argsort(m.round, kind="stable")
    edges = np.flatnonzero(np.diff(m.round[order], prepend=-1, append=-1))
    for first, last in itertools.pairwise(edges.tolist()):
        rows = order[first:last].tolist()
        flights = [counts[m.src[row], begin[row] : finish[row]].copy() for row in rows]
        for row, flight in zip(rows, flights, strict=True):
            target = counts[m.dst[row], into[row] : into[row] + len(flight)]
            if m.add[row]:
                target += flight
            else:
                target[:] = flight
    _compare(schedule, cuts, counts, moves)


def _compare(schedule: Schedule, cuts: Ints, counts: npt.NDArray[np.int32], moves: bool) -> None:
    """Each rank must hold what the collective promises, where it promises anything."""
    world_size, places = schedule.world_size, len(cuts) - 1
    owner = np.searchsorted(bounds(schedule.numel, world_size), cuts[:-1], side="right") - 1
    root = schedule.parameters.get("root", 0)
    everyone = range(world_size)
    for rank in everyone:
        for place in range(places):
            expected = np.zeros(counts.shape[2], dtype=np.int32)
            wanted: Sequence[int] = everyone
            match schedule.collective:
                case "all_reduce":
                    pass
                case "reduce":
                    if rank != root:
                        continue
                case "reduce_scatter":
                    if owner[place] != rank:
                        continue
                case "broadcast":
                    wanted = [root]
                case "all_gather":
                    wanted = [int(owner[place])]
                case "neighbourhood":
                    if schedule.sources is None:
                        raise ScheduleError("a neighbourhood schedule must say its sources")
                    wanted = schedule.sources[rank]
                case "all_to_all":
                    wanted = []
                    sender = int(owner[place])
                    shift = int(cuts[place]) + (rank - sender) * (schedule.numel // world_size)
                    expected[sender * places + int(np.searchsorted(cuts, shift))] = 1
                case other:
                    raise ScheduleError(f"cannot tell what the collective '{other}' promises")
            for contributor in wanted:
                expected[contributor * places + place if moves else contributor] = 1
            if not np.array_equal(counts[rank, place], expected):
                raise ScheduleError(_difference(schedule, rank, cuts[place : place + 2], counts[rank, place], expected))


def _difference(
    schedule: Schedule, rank: int, span: Ints, got: npt.NDArray[np.int32], expected: npt.NDArray[np.int32]
) -> str:
    symbol = int(np.flatnonzero(got != expected)[0])
    contributor = symbol // (len(got) // schedule.world_size)
    return (
        f"{schedule.algorithm} {schedule.collective}: rank {rank} ends with values {span[0]}:{span[1]} holding rank "
        f"{contributor}'s contribution {got[symbol]} times instead of {expected[symbol]}"
    )
