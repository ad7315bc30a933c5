"""Which workers of an elastic training were lost: who, when, at which step, how, and who came instead.

Callers: `driver.py` writes it into the record as it happens, `trial.py` puts it on the curves. Two sources become one
timeline: what the workers saw of each other (members/events.jsonl), and how the processes ended, which only the command
that started them knows (exits.jsonl).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from laconic.consistency.churn.meeting import Meeting, read_events
from laconic.lab.records.interruptions import count
from laconic.lab.records.record import Interruption
from laconic.lab.runs.elastic.journals import ExitRow, Journals, StartRow, WorkerRow


@dataclass(frozen=True)
class Loss:
    """A worker was lost, in seconds since 1970; at most `lost` steps had to be made again."""

    when: float
    step: int
    worker: int | None
    what: str
    lost: int = 0

    @property
    def sentence(self) -> str:
        """In words, with what was lost."""
        return f"{self.what}; at most {count(self.lost, 'step')} done again" if self.lost else self.what


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
            found.append(Loss(when, step, worker, text, int(event["lost"])))
    for each in exits:
        worker = numbers.get(each.pid)
        if worker is None or worker not in seen:
            name = f"worker {worker}" if worker is not None else "a worker that had not joined yet"
            found.append(Loss(each.when, each.step, worker, f"{name} {each.how}"))
    return found


def _after(worker: int, workers: Sequence[WorkerRow], joined: dict[int, int]) -> str:
    """Who has come in a lost worker's place, or as whom it has come back."""
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
