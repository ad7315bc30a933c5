"""Which workers of an elastic training were lost: who, when, at which step, how, and who came instead.

Callers: `elastic_run.py` writes it into the record as it happens, `elastic_trial.py` puts it on the curves. Two sources
are told as one: what the workers saw of each other (members/events.jsonl), and how the processes ended, which only the
command that started them knows (ends.jsonl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from laconic.consistency.churn.meeting import Meeting, read_events
from laconic.lab.elastic.worker import WorkerRow, meeting_of, workers_journal
from laconic.lab.records.interruptions import count
from laconic.lab.records.journal import Journal
from laconic.lab.records.record import Interruption


@dataclass(frozen=True)
class StartRow:
    """A start of the run: its first is 1; it goes on from the checkpoint at step `resume`, 0 without one."""

    start: int
    resume: int


@dataclass(frozen=True)
class EndRow:
    """A process that ended too early: in seconds since 1970, how, and after which step as far as is known."""

    start: int
    place: int
    pid: int
    when: float
    how: str
    step: int


@dataclass(frozen=True)
class Loss:
    """A worker was lost, in seconds since 1970; at most `lost` steps had to be made again."""

    when: float
    step: int
    worker: int | None
    what: str
    lost: int = 0

    @property
    def told(self) -> str:
        """In words, with what was lost."""
        return f"{self.what}; at most {count(self.lost, 'step')} done again" if self.lost else self.what


def ends_journal(folder: Path) -> Journal[EndRow]:
    """Processes that ended too early."""
    return Journal(folder / "ends.jsonl", EndRow)


def starts_journal(folder: Path) -> Journal[StartRow]:
    """The starts of a run."""
    return Journal(folder / "starts.jsonl", StartRow)


def story(folder: Path) -> list[Loss]:
    """Every loss of a worker so far, in order, each once."""
    workers, ends = workers_journal(folder).read(), ends_journal(folder).read()
    found: list[Loss] = []
    for begun in starts_journal(folder).read():
        own = [row for row in workers if row.start == begun.start]
        found += _of_start(folder, begun, own, [row for row in ends if row.start == begun.start])
    return sorted(found, key=lambda each: each.when)


def _of_start(folder: Path, begun: StartRow, workers: Sequence[WorkerRow], ends: Sequence[EndRow]) -> list[Loss]:
    meeting = meeting_of(folder, begun.start)
    view, events = Meeting(meeting).newest(), read_events(meeting)
    numbers = {row.pid: row.worker for row in workers}  # the last number that a process had
    how = {numbers[end.pid]: end.how for end in ends if end.pid in numbers}
    joined = {event["rank"]: begun.resume + event["step"] for event in events if event["what"] == "joined"}
    found, told = [], set()
    for event in events if view is not None else ():
        assert view is not None
        worker, what = event["rank"], event["what"]
        if what.startswith("lost"):
            told.add(worker)
            why = how.get(worker, f"was given up: {what.removeprefix('lost: ')}")
            text = f"worker {worker} {why}{_after(worker, workers, joined)}"
            when, step = view.begun + event["seconds"], begun.resume + event["step"]
            found.append(Loss(when, step, worker, text, int(event["lost"])))
    for end in ends:
        worker = numbers.get(end.pid)
        if worker is None or worker not in told:
            name = f"worker {worker}" if worker is not None else "a worker that had not joined yet"
            found.append(Loss(end.when, end.step, worker, f"{name} {end.how}"))
    return found


def _after(worker: int, workers: Sequence[WorkerRow], joined: dict[int, int]) -> str:
    """Who has come in a lost worker's place, or as whom it has come back."""
    mine = next((row for row in workers if row.worker == worker), None)
    if mine is None:
        return ""
    next_one = next((row for row in workers if row.place == mine.place and row.worker > worker), None)
    if next_one is None or next_one.worker not in joined:
        return ""
    how = "it came back as" if next_one.pid == mine.pid else "its place was taken by"
    return f"; {how} worker {next_one.worker} after step {joined[next_one.worker]}"


def as_interruptions(losses: Sequence[Loss]) -> list[Interruption]:
    """The losses, for the record."""
    return [
        Interruption(
            datetime.fromtimestamp(each.when, UTC).isoformat(timespec="seconds"), each.step, each.worker, each.what,
            each.lost, ended=False,
        )
        for each in losses
    ]  # fmt: skip
