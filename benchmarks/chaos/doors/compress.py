"""`laconic.compress`, on DDP and on FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import Any, ClassVar

import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from benchmarks.chaos import loop
from benchmarks.chaos.doors.base import Door
from benchmarks.chaos.task import Notes, Task
from laconic.transports.world import World

DDP_S = 60.0  # what DDP waits for by itself, in which nothing is injected, outlasts us


class Compress(Door):
    name: ClassVar[str] = "compress"

    def cases(self, engine: str) -> list[str]:
        return ["ddp", "ddp", "fsdp"]

    def alike(self, case: str) -> bool:
        return case == "ddp"

    def foreign(self, case: str) -> bool:
        return case == "fsdp"  # the weights are gathered by torch

    def saves(self, case: str) -> bool:
        return case == "ddp"  # a sharded model's checkpoints are torch's

    def run(self, task: Task, world: World | None, notes: Notes) -> Iterable[Tensor]:
        assert world is not None
        store = world.new_store("ddp")
        wait = timedelta(seconds=task.timeout_s if self.foreign(task.case) else DDP_S)
        dist.init_process_group("gloo", store=store, rank=world.rank, world_size=world.world_size, timeout=wait)
        model = loop.network(task, notes)
        trained = self._sharded(model) if task.case == "fsdp" else DistributedDataParallel(model)
        notes.at("start")
        options: dict[str, Any] = {"algorithm": "ring", "message_nbytes": loop.MESSAGE_NBYTES}
        job = laconic.compress(trained, task.codec, world=world, **(options if task.case == "ddp" else {}))
        try:
            optimizer = loop.optimizer_of(model)

            def make(step: int) -> None:
                loop.loss(trained, task.seed, world.rank, step).backward()

            loop.train(task, world, notes, model, optimizer, make, kept=job)
            notes.at("finish")
            job.finish()
            notes.at("close")
        finally:
            job.close()
        return [p.to_local() if hasattr(p, "to_local") else p for p in model.parameters()]

    def _sharded(self, model: nn.Sequential) -> nn.Module:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in (model[0], model[3], model[6]):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
