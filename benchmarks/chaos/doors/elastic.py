"""`laconic.elastic`, by every mode that it has."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

import laconic
from benchmarks.chaos import loop
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.phases import TRAINING
from benchmarks.chaos.task import EVERY, Late, Notes, Task
from laconic import consistency
from laconic.consistency.elastic.door import way_for
from laconic.errors import BadInput
from laconic.transports.world import World

SAMPLES = 12  # of a step over all workers


class Elastic(Door):
    name: ClassVar[str] = "elastic"
    engines: ClassVar[tuple[str, ...]] = ("zmq",)
    phases: ClassVar[tuple[str, ...]] = tuple(each for each in TRAINING if each not in ("finish", "checkpoint"))
    sizes: ClassVar[tuple[int, ...]] = (3, 4)
    joins: ClassVar[bool] = False

    def cases(self, engine: str) -> list[str]:
        examples = [spec for name in consistency.names() for spec in consistency.get(name).examples]
        return [spec for spec in examples if _is_elastic(spec)]

    def outlives(self, case: str, rank: int, ranks: int) -> bool:
        return True

    def repeatable(self, case: str) -> bool:
        return False

    def saves(self, case: str) -> bool:
        return False

    def options(self, task: Task) -> dict[str, Any]:
        """Of `laconic.elastic`, for this case."""
        return {"consistency": task.case}

    def sample_s(self, task: Task, rank: int) -> float:
        """How much longer a sample takes a rank."""
        return 0.0

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        model = loop.network(task, notes)
        optimizer = loop.optimizer_of(model)
        samples = laconic.Samples(SAMPLES * task.steps, SAMPLES, epochs=1, seed=task.seed)
        meeting = task.meeting or task.checkpoints or str(Path(task.folder, "meeting"))
        sample_s = self.sample_s(task, notes.rank)
        notes.at("start")
        with laconic.elastic(
            model, optimizer, samples, meeting, codec=task.codec, workers=task.workers or task.ranks,
            patience_s=task.timeout_s, **self.options(task),
        ) as job:  # fmt: skip
            notes.add(begin=job.steps)
            for batch in job.batches():
                notes.begin(job.steps)
                notes.at("batch")
                numbers = [int(each) for each in batch]
                if numbers:
                    torch.stack([loop.loss(model, task.seed, 0, each) for each in numbers]).mean().backward()
                    time.sleep(sample_s * len(numbers))
                if job.step():
                    notes.add(step=job.steps)
                    if job.steps % EVERY == 0:
                        loop.evaluate(model, task.seed)
                time.sleep(task.pace_s)
            notes.at("close")
        if not job.finished:
            raise Late("the training ended without this worker")
        return list(model.parameters())


def _is_elastic(spec: str) -> bool:
    try:
        way_for(spec, 3)
    except BadInput:
        return False
    return True
