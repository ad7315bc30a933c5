"""What the workers of an elastic training, and the command that starts them, write down; it outlives each of them.

    steps.jsonl          a row for each step from each worker that made it
    evaluations.jsonl    a row for each evaluation, from whoever was coordinator
    workers.jsonl        who has joined, under which number and process
    starts.jsonl         the starts of the run
    exits.jsonl          processes that ended too early

Invariant: a row of a later start or view replaces those of the same step from earlier ones: that step was made again.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laconic.lab.records.journal import Journal


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
    """Who has joined: its number, its process, and how long it had read data before."""

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
