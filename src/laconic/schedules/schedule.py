"""A collective written as data: who sends which slice to whom, in which round, and what the receiver does with it.

Callers: the algorithms in this folder build schedules; `transports` runs or simulates them; `exchange` adds codecs.

Invariants:
- Rounds are global: a message is sent and received in the same round, and a rank enters round k+1 when its own part
  of round k is done. So a valid schedule cannot deadlock, not even where every send waits for its receive.
- Within a round every send reads the buffer as it was before the round.
- Messages live in NumPy columns, so that 65,536 ranks are as easy to write as four.
"""

from __future__ import annotations

import functools
import zlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from laconic.errors import BadInput

Ints = npt.NDArray[np.int64]
Op = Literal["add", "copy"]
MAX_LINES = 64  # of a drawing: a terminal screen or two
MAX_PAIRS = 24  # conversations per round before the rest is counted, not listed


@dataclass(frozen=True)
class Send:
    """Send buffer[start:stop] to `peer`."""

    peer: int
    start: int
    stop: int


@dataclass(frozen=True)
class Recv:
    """Receive into buffer[start:stop] from `peer`: add to what is there, or copy over it."""

    peer: int
    start: int
    stop: int
    op: Op


Round = tuple[Send | Recv, ...]


class Messages(NamedTuple):
    """Columns of equal length, one row a message: src's buffer[start:stop] goes to dst's buffer[at:at+stop−start]."""

    round: Ints
    src: Ints
    dst: Ints
    start: Ints
    stop: Ints
    at: Ints
    add: npt.NDArray[np.bool_]

    @classmethod
    def empty(cls) -> Messages:
        none = np.zeros(0, dtype=np.int64)
        return cls(none, none, none, none, none, none, np.zeros(0, dtype=np.bool_))

    @classmethod
    def in_round(
        cls,
        round: int,
        src: npt.ArrayLike,
        dst: npt.ArrayLike,
        start: npt.ArrayLike,
        stop: npt.ArrayLike,
        op: Op,
        at: npt.ArrayLike | None = None,
    ) -> Messages:
        """The messages of one round; scalars are repeated for every row, empty messages are left out."""
        columns = np.broadcast_arrays(*(np.asarray(c, dtype=np.int64) for c in (src, dst, start, stop)))
        source, destination, first, last = (np.atleast_1d(column) for column in columns)
        place = first if at is None else np.broadcast_to(np.asarray(at, dtype=np.int64), source.shape)
        full = last > first
        rows = int(np.count_nonzero(full))
        return cls(
            np.full(rows, round, dtype=np.int64),
            source[full],
            destination[full],
            first[full],
            last[full],
            place[full],
            np.full(rows, op == "add", dtype=np.bool_),
        )

    @classmethod
    def join(cls, parts: Iterable[Messages]) -> Messages:
        """All rows of `parts`, in order."""
        tables = list(parts)
        if not tables:
            return cls.empty()
        return cls(*(np.concatenate(columns) for columns in zip(*tables, strict=True)))

    def placed(self, *, rounds: int = 0, ranks: npt.ArrayLike | None = None, offset: int = 0) -> Messages:
        """The same messages later, between other ranks (rank i becomes ranks[i]), or further along the buffer."""
        names = None if ranks is None else np.asarray(ranks, dtype=np.int64)
        return self._replace(
            round=self.round + rounds,
            src=self.src if names is None else names[self.src],
            dst=self.dst if names is None else names[self.dst],
            start=self.start + offset,
            stop=self.stop + offset,
            at=self.at + offset,
        )

    @property
    def rounds(self) -> int:
        """How many rounds the rows span, from round 0."""
        return int(self.round.max()) + 1 if len(self.round) else 0


@dataclass(frozen=True, eq=False)
class Schedule:
    """One collective for `world_size` ranks on buffers of `numel` values; equal only to itself.

    Attributes:
        collective: all_reduce, reduce, broadcast, reduce_scatter, all_gather, all_to_all or neighbourhood.
        parameters: what the algorithm was called with beyond world_size and numel (root, segment, hosts…).
        sources: for neighbourhood, the ranks whose values each rank ends with, itself included.

    Example:
        >>> from laconic.schedules import ring
        >>> ring(4, 1000).sent_numel
        6000
    """

    collective: str
    algorithm: str
    world_size: int
    numel: int
    messages: Messages = field(repr=False)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    sources: tuple[tuple[int, ...], ...] | None = field(default=None, repr=False)

    @property
    def rounds(self) -> int:
        """The number of rounds."""
        return self.messages.rounds

    @property
    def sent_numel(self) -> int:
        """Values sent by all ranks together."""
        return int((self.messages.stop - self.messages.start).sum())

    def sent_numel_by_rank(self) -> Ints:
        """Values sent by each rank."""
        lengths = (self.messages.stop - self.messages.start).astype(np.float64)
        return np.bincount(self.messages.src, weights=lengths, minlength=self.world_size).astype(np.int64)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Eight digits that differ between different schedules: ranks compare them before they talk."""
        code = 0
        for column in self.messages:
            code = zlib.crc32(np.ascontiguousarray(column).data, code)
        return f"{code:08x}"

    def program(self, rank: int) -> list[tuple[int, Round]]:
        """What one rank does: each round it takes part in, by number, its sends and receives in schedule order."""
        m = self.messages
        mine = np.flatnonzero((m.src == rank) | (m.dst == rank))
        order = mine[np.argsort(m.round[mine], kind="stable")]
        rounds: dict[int, list[Send | Recv]] = {}
        for row in order.tolist():
            ops = rounds.setdefault(int(m.round[row]), [])
            start, stop, at = int(m.start[row]), int(m.stop[row]), int(m.at[row])
            if m.src[row] == rank:
                ops.append(Send(int(m.dst[row]), start, stop))
            else:
                ops.append(Recv(int(m.src[row]), at, at + stop - start, "add" if m.add[row] else "copy"))
        return [(number, tuple(ops)) for number, ops in sorted(rounds.items())]

    def __str__(self) -> str:
        """One line a round: `0⇄1` is an exchange, `0→1` one way, `+` adds, `=` copies, with the slice that travels."""
        head = (
            f"{self.algorithm} {self.collective}: {self.world_size} ranks, {self.numel} values, "
            f"{self.rounds} rounds, {len(self.messages.round)} messages, {self.sent_numel} values sent"
        )
        lines = [f"round {number + 1:>3}  " + _round(self, number) for number in range(min(self.rounds, MAX_LINES))]
        more = [f"… and {self.rounds - MAX_LINES} rounds more"] if self.rounds > MAX_LINES else []
        return "\n".join([head, *lines, *more])


def _round(schedule: Schedule, number: int) -> str:
    m = schedule.messages
    rows = np.flatnonzero(m.round == number)
    spans: dict[tuple[int, int], list[str]] = {}
    for row in rows.tolist():
        key = (int(m.src[row]), int(m.dst[row]))
        spans.setdefault(key, []).append(f"{'+' if m.add[row] else '='}[{m.start[row]}:{m.stop[row]}]")
    whole = {f"{sign}[0:{schedule.numel}]" for sign in "+="}
    uniform = {tuple(s) for s in spans.values()}
    same = len(uniform) == 1 and next(iter(uniform))[0] in whole
    talks = []
    for (src, dst), slices in sorted(spans.items()):
        back = spans.get((dst, src))
        if back is not None and dst < src:
            continue
        arrow = "⇄" if back is not None else "→"
        text = f"{src}{arrow}{dst}"
        if not same:
            text += "".join(slices) + ("/" + "".join(back) if back is not None and back != slices else "")
        talks.append(text)
    shown = "  ".join(talks[:MAX_PAIRS])
    if len(talks) > MAX_PAIRS:
        shown += f"  … and {len(talks) - MAX_PAIRS} more"
    return shown + (f"   {'adds' if next(iter(uniform))[0][0] == '+' else 'copies'} everything" if same else "")


def bounds(numel: int, parts: int) -> Ints:
    """Where `parts` nearly equal chunks of `numel` values begin; parts+1 entries, the last is numel."""
    return np.arange(parts + 1, dtype=np.int64) * numel // parts


def check_sizes(world_size: int, numel: int) -> None:
    """Refuse a world without ranks or a negative buffer."""
    if world_size < 1:
        raise BadInput(f"world_size must be at least 1, got {world_size}")
    if numel < 0:
        raise BadInput(f"numel must be at least 0, got {numel}")


def core_size(world_size: int) -> int:
    """The largest power of two that is not above P: the ranks that do the exchange."""
    return 1 << (world_size.bit_length() - 1)
