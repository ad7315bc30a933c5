"""`laconic.shrink` with a folder to go on in, and the `.lac` file that it writes over an older one."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import laconic
from benchmarks.chaos import loop
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.task import Notes, Task
from laconic.transports.world import World

ROUNDS = 3


class Shrink(Door):
    name: ClassVar[str] = "shrink"
    engines: ClassVar[tuple[str, ...]] = ("alone",)
    phases: ClassVar[tuple[str, ...]] = ("batch", "forward", "backward", "optimiser", "checkpoint")
    sizes: ClassVar[tuple[int, ...]] = (1,)
    alone: ClassVar[bool] = True
    joins: ClassVar[bool] = False

    def cases(self, engine: str) -> list[str]:
        return ["searched", "planned"]

    def codecs(self, case: str) -> list[str]:
        return ["none"]

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        folder = Path(task.checkpoints or Path(task.folder, "disk"))
        folder.mkdir(parents=True, exist_ok=True)
        model, path = loop.network(task, notes), folder / "model.lac"
        if not path.exists():
            laconic.shrink(model).save(path)  # what is there before
        before = laconic.load_shrunk(path)
        notes.add(begin=0)

        def train(trained: nn.Module) -> None:
            optimizer = loop.optimizer_of(trained)
            for step in range(4):
                notes.begin(notes.step + 1)
                notes.at("batch")
                optimizer.zero_grad()
                loop.loss(trained, task.seed, 0, step).backward()
                optimizer.step()

        def judge(judged: nn.Module) -> float:
            with torch.no_grad():
                return float(sum(loop.loss(judged, task.seed, 0, step) for step in range(4)))

        plan = laconic.shrinking.Plan(density=0.3, bits=4, rounds=ROUNDS)
        if task.case == "searched":
            small = laconic.shrink(model, train, judge, budget=1.0, plan=plan, folder=folder / "kept")
        else:
            small = laconic.shrink(model, train, plan=plan)
        notes.begin(task.steps)
        try:
            small.save(path)
        except laconic.errors.StorageError:
            now = laconic.load_shrunk(path)  # the file that was there is intact
            assert all(torch.equal(now[name], value) for name, value in before.items())
            raise
        found = laconic.load_shrunk(path)
        return [found[name] for name in sorted(found)]
