"""`laconic.distribute` by every registered mode, and by `sync` with all in `step()`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

from torch import Tensor

import laconic
from benchmarks.chaos import loop
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.task import Notes, Task
from laconic import consistency
from laconic.consistency import Mode
from laconic.transports.world import World

# Beside the examples of every mode: a rank that only serves, shards with copies, neighbours that are fixed.
MORE_MODES = ("async(servers=1)", "stale(4, replicas=1)", "gossip(ring, asynchronous=true)")
NOT_OVERLAPPED = "sync, overlap=False"


def mode_of(case: str) -> Mode:
    """The mode of a case."""
    return consistency.build(case.partition(", overlap=")[0])


class Distribute(Door):
    name: ClassVar[str] = "distribute"
    engines: ClassVar[tuple[str, ...]] = ("gloo", "zmq", "threads", "mpi")

    def cases(self, engine: str) -> list[str]:
        examples = [spec for name in consistency.names() for spec in consistency.get(name).examples]
        return [*examples, *MORE_MODES, NOT_OVERLAPPED]

    def codecs(self, case: str) -> list[str]:
        return ["none"] if mode_of(case).no_codec else super().codecs(case)

    def ranks(self, case: str, engine: str) -> tuple[int, ...]:
        if case in MORE_MODES or "replicas" in case:
            return (3, 4)
        if engine != "mpi" and any(self.outlives(case, rank, 3) for rank in range(3)):
            return (3, 4)  # somebody has to go on with somebody
        return super().ranks(case, engine)

    def outlives(self, case: str, rank: int, ranks: int) -> bool:
        return mode_of(case).outlives(rank, ranks)

    def repeatable(self, case: str) -> bool:
        return mode_of(case).repeatable

    def saves(self, case: str) -> bool:
        return "servers=" not in case  # a rank that only serves is in finish() all the time

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        assert world is not None
        model = loop.network(task, notes)
        optimizer = loop.optimizer_of(model)
        mode = mode_of(task.case)
        codec = None if mode.no_codec else task.codec
        # `auto` measures, and may choose otherwise the next time
        options: dict[str, Any] = {"algorithm": "ring"} if codec and "algorithm" in mode.options else {}
        if codec and "message_nbytes" in mode.options:
            options["message_nbytes"] = loop.MESSAGE_NBYTES
        if task.case == NOT_OVERLAPPED:
            options["overlap"] = False
        notes.at("start")
        job = laconic.distribute(model, optimizer, consistency=mode, codec=codec, world=world, **options)

        def make(step: int) -> None:
            loop.loss(model, task.seed, world.rank, step).backward()

        try:
            loop.train(task, world, notes, model, optimizer, make, getattr(job, "serves_only", False))
            notes.at("finish")
            job.finish()
            notes.at("close")
        finally:
            job.close()
        return list(model.parameters())
