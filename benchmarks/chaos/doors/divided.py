"""`laconic.divide`: layers divided over ranks, on a line and on a grid; and models in stages, by every schedule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from torch import Tensor, nn

import laconic
from benchmarks.chaos import loop
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.phases import TRAINING
from benchmarks.chaos.task import Notes, Task
from laconic import codecs
from laconic.parallel import Stages
from laconic.parallel.forms.stages import SCHEDULES
from laconic.transports.world import World

CUTS = {2: ("6",), 3: ("3", "6"), 4: ("3", "6", "9")}  # where stages begin, by the number of ranks


class _Parted(Door):
    """A door whose ranks hold parts of the model, and are given the same batches."""

    engines: ClassVar[tuple[str, ...]] = ("gloo", "zmq", "threads")
    phases: ClassVar[tuple[str, ...]] = tuple(each for each in TRAINING if each != "finish")

    def codecs(self, case: str) -> list[str]:
        kinds = [codecs.get(name) for name in codecs.names()]
        return ["none", *(kind.name for kind in kinds if kind.kind == "quantiser" and kind.fixed_size is True)]

    def resumes(self, case: str, codec: str) -> bool:
        return not codecs.codec(codec).stochastic  # how often a cut has drawn at random is in no checkpoint

    def alike(self, case: str) -> bool:
        return False


class Divide(_Parted):
    name: ClassVar[str] = "divide"

    def cases(self, engine: str) -> list[str]:
        return ["0=dense(output); 3=dense(input)", "0=dense(summa); 3=dense(1.5d)", "3=dense(output); 6=dense(output)"]

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        assert world is not None
        notes.at("start")
        model = laconic.divide(loop.network(task, notes), task.case, codec=task.codec, world=world)
        optimizer = loop.optimizer_of(model)

        def make(step: int) -> None:
            loop.loss(model, task.seed, 0, step).backward()

        loop.train(task, world, notes, model, optimizer, make)
        notes.at("close")
        return list(model.parameters())


class Pipelines(_Parted):
    name: ClassVar[str] = "pipeline"

    def cases(self, engine: str) -> list[str]:
        return list(SCHEDULES)

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        assert world is not None
        notes.at("start")
        stages = Stages(CUTS[task.ranks], 4, task.case)
        model = laconic.divide(loop.network(task, notes), stages, codec=task.codec, world=world)
        optimizer = loop.optimizer_of(model)

        def make(step: int) -> None:
            model.step(*loop.batch(task.seed, 0, step), nn.functional.cross_entropy)

        loop.train(task, world, notes, model, optimizer, make)
        notes.at("close")
        return list(model.parameters())
