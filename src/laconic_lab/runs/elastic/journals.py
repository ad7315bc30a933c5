"""Journals of an elastic training, written by its workers and the command that starts them; they outlive each of them.

    steps.jsonl          a row for each step from each worker that made it
    evaluations.jsonl    a row for each evaluation, from the coordinator at that time
    workers.jsonl        who has joined, under which number and process
    starts.jsonl         the starts of the run
    exits.jsonl          processes that ended too early

A row is one line of sealed JSON: of a writer that dies in the middle only its own row is lost, and one that is damaged
counts as lost. Invariant: a row of a later start or view replaces those of the same step from earlier ones: that step
was made again.

`losses` tells which workers were lost, from two sources: what the workers saw of each other (members/events.jsonl), and
how the processes ended, which only the command that started them knows (exits.jsonl).
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Generic, TypeVar

from laconic import words
from laconic.consistency.elastic.meeting import Meeting, read_events
from laconic.errors import PayloadError
from laconic.storage.files import append
from laconic.storage.json_text import parse_lines, seal, unseal
from laconic.storage.typed_json import from_plain, to_plain
from laconic_lab.records.record import Interruption

Row = TypeVar("Row")
_TAIL_NBYTES = 4096


class Journal(Generic[Row]):
    """The rows of one kind, a dataclass of plain values, in one file; it is made by the first row."""

    def __init__(self, path: Path, kind: type[Row]) -> None:
        self.path, self._kind = path, kind

    def add(self, row: Row) -> None:
        """Append a row; later readers see it, even if this process is killed."""
        append(self.path, [seal(to_plain(row))])

    def read(self) -> list[Row]:
        """All whole rows, in the order they were written."""
        return self._rows(0)

    def last(self) -> Row | None:
        """The newest whole row."""
        rows = self._rows(max(0, self.nbytes - _TAIL_NBYTES))
        return rows[-1] if rows else None

    @property
    def nbytes(self) -> int:
        """The file's size: it grows with every row."""
        return self.path.stat().st_size if self.path.exists() else 0

    def _rows(self, begin: int) -> list[Row]:
        """The whole rows from a byte of the file on."""
        rows = []
        with contextlib.suppress(FileNotFoundError), open(self.path, "rb") as file:
            file.seek(begin)
            for values in parse_lines(file.read(), unseal):
                with contextlib.suppress(PayloadError):  # another kind of row
                    rows.append(from_plain(self._kind, values, "the row"))
        return rows


@dataclass(frozen=True)
class StepRow:
    """A step as one of its `members` saw it; `began`, and `at` when it was committed, by the machine's one clock."""

    step: int
    start: int
    view: int
    members: int
    worker: int
    coordinator: bool
    began: float
    at: float
    compute: float
    wait: float
    sent: float
    loss: float
    samples: int


@dataclass(frozen=True)
class EvaluationRow:
    """An evaluation after `step` steps, and how long it and its checkpoint held up the others."""

    step: int
    start: int
    worker: int
    took: float
    loss: float
    accuracy: float | None
    reached: bool


@dataclass(frozen=True)
class WorkerRow:
    """A worker that has joined: its number, its process, and how long it had read data before."""

    worker: int
    start: int
    index: int
    pid: int
    loading: float


@dataclass(frozen=True)
class StartRow:
    """A start of the run: its first is 1; it goes on from the checkpoint at step `resume`, 0 without one."""

    start: int
    resume: int


@dataclass(frozen=True)
class ExitRow:
    """A process that ended too early: in seconds since 1970, how, and after which step as far as is known."""

    start: int
    index: int
    pid: int
    when: float
    how: str
    step: int


class Journals:
    """The journals of a run's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.steps = Journal(folder / "steps.jsonl", StepRow)
        self.evaluations = Journal(folder / "evaluations.jsonl", EvaluationRow)
        self.workers = Journal(folder / "workers.jsonl", WorkerRow)
        self.starts = Journal(folder / "starts.jsonl", StartRow)
        self.exits = Journal(folder / "exits.jsonl", ExitRow)

    def meeting(self, start: int) -> Path:
        """Where the workers of a start meet."""
        return self.folder / ("members" if start == 1 else f"members-{start}")


@dataclass(frozen=True)
class Loss:
    """A worker was lost, in seconds since 1970; at most `lost` steps had to be made again."""

    when: float
    step: int
    worker: int | None
    what: str
    lost: int = 0
    given_up: bool = False  # by the others, while its process may live

    @property
    def sentence(self) -> str:
        """In words, with what was lost."""
        return f"{self.what}; at most {words.count(self.lost, 'step')} done again" if self.lost else self.what


def losses(journals: Journals) -> list[Loss]:
    """Every loss of a worker so far, in order, each once."""
    workers, exits = journals.workers.read(), journals.exits.read()
    found: list[Loss] = []
    for begun in journals.starts.read():
        own = [row for row in workers if row.start == begun.start]
        found += _of_start(journals, begun, own, [row for row in exits if row.start == begun.start])
    return sorted(found, key=lambda each: each.when)


def _of_start(
    journals: Journals, begun: StartRow, workers: Sequence[WorkerRow], exits: Sequence[ExitRow]
) -> list[Loss]:
    meeting = journals.meeting(begun.start)
    view, events = Meeting(meeting).newest(), read_events(meeting)
    numbers = {row.pid: row.worker for row in workers}  # the last number that a process had
    how = {numbers[each.pid]: each.how for each in exits if each.pid in numbers}
    joined = {event["rank"]: begun.resume + event["step"] for event in events if event["what"] == "joined"}
    found, seen = [], set()
    for event in events if view is not None else ():
        assert view is not None
        worker, what = event["rank"], event["what"]
        if what.startswith("lost"):
            seen.add(worker)
            why = how.get(worker, f"was given up: {what.removeprefix('lost: ')}")
            text = f"worker {worker} {why}{_after(worker, workers, joined)}"
            when, step = view.begun + event["seconds"], begun.resume + event["step"]
            found.append(Loss(when, step, worker, text, int(event["lost"]), worker not in how))
    for each in exits:
        worker = numbers.get(each.pid)
        if worker is None or worker not in seen:
            name = f"worker {worker}" if worker is not None else "a worker that had not joined yet"
            found.append(Loss(each.when, each.step, worker, f"{name} {each.how}"))
    return found


def _after(worker: int, workers: Sequence[WorkerRow], joined: dict[int, int]) -> str:
    """The worker that replaced a lost one, or the number under which it came back."""
    mine = next((row for row in workers if row.worker == worker), None)
    if mine is None:
        return ""
    next_one = next((row for row in workers if row.index == mine.index and row.worker > worker), None)
    if next_one is None or next_one.worker not in joined:
        return ""
    how = "it came back as" if next_one.pid == mine.pid else "its place was taken by"
    return f"; {how} worker {next_one.worker} after step {joined[next_one.worker]}"


def as_interruptions(found: Sequence[Loss]) -> list[Interruption]:
    """The losses, for the record."""
    return [
        Interruption(
            datetime.fromtimestamp(each.when, UTC).isoformat(timespec="seconds"), each.step, each.worker, each.what,
            each.lost, ended=False,
        )
        for each in found
    ]  # fmt: skip
