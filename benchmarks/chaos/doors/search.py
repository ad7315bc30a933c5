"""`laconic.search`: trials in processes of their own, whose results are kept in a journal."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor

import laconic
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.task import Notes, Task
from laconic.errors import LaconicError
from laconic.searching import Trial
from laconic.transports.world import World

SPACE, TRIALS = "a = int(1, 4); b = int(1, 3)", 12
TASK = "task.json"  # beside the search: its objective reads there what is to happen to it


class Unfinished(LaconicError):
    """The search ended, and not all of its trials."""


def objective(trial: Trial) -> float:
    """A function of the parameters; the trap of the task springs in one of the processes that evaluate it."""
    folder = trial.folder.parent
    task = Task.of(json.loads((folder / TASK).read_text()))
    notes = Notes(task, 0)
    notes.step = trial.number
    value = float(-abs(trial.params["a"] - 3) - abs(trial.params["b"] - 2) / 10)
    for step in range(3):
        _at(notes, "trial")
        trial.report(value, step)
        _at(notes, "report")
    return value


def _at(notes: Notes, phase: str) -> None:
    """Spring once over all processes: whoever makes the file first."""
    trap = notes.task.trap
    if trap is None or trap.phase != phase or notes.step < trap.step:
        return
    try:
        os.close(os.open(Path(notes.task.folder, "sprung"), os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    notes.spring(trap)


class Search(Door):
    name: ClassVar[str] = "search"
    engines: ClassVar[tuple[str, ...]] = ("alone",)
    phases: ClassVar[tuple[str, ...]] = ("trial", "report", "journal")
    sizes: ClassVar[tuple[int, ...]] = (1,)
    alone: ClassVar[bool] = True
    joins: ClassVar[bool] = False

    def cases(self, engine: str) -> list[str]:
        return ["grid"]

    def codecs(self, case: str) -> list[str]:
        return ["none"]

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        folder = Path(task.checkpoints or Path(task.folder, "disk"))
        folder.mkdir(parents=True, exist_ok=True)
        (folder / TASK).write_text(json.dumps(task.values()))
        notes.add(begin=0)
        notes.begin(0)
        # ended one after the other: `note` is called in this process
        found = laconic.search(
            objective, SPACE, task.case, TRIALS, parallel=2, seed=task.seed, folder=folder / "search",
            note=lambda trial, spec: notes.begin(notes.step + 1), retries=3,
        )  # fmt: skip
        ended = [each for each in found.history.trials.values() if each.state == "done"]
        if len(ended) != TRIALS:
            raise Unfinished(f"{len(ended)} of {TRIALS} trials have ended")
        rows = sorted((each.point["a"], each.point["b"], each.score) for each in ended)
        return [torch.tensor(rows, dtype=torch.float64)]
