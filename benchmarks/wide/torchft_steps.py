"""A step of torchft's DiLoCo on an emulated link, beside the same step without any exchange.

Caller: `wan.py`, where torchft is installed: it is a peer, and no dependency. Outer steps block, in float32, over gloo.
"""

from __future__ import annotations

import copy
import importlib.util
import os
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.wide.tables import TORCHFT
from laconic.workloads import Task, get
from laconic_lab.bench.step import ALONE
from laconic_lab.bench.turns import SENT, Figures, Turns, Way, host, on_hosts, slowest, timing

NAME = "torchft"
PORT = 29510  # of its lighthouse, on the first host
PATIENCE = timedelta(seconds=300)


def is_installed() -> bool:
    """Whether there is a torchft to measure."""
    return importlib.util.find_spec(NAME) is not None


def measure(workload: str, link: str | None, period: int, blocks: int) -> dict[str, Any]:
    """The medians of a step over whole periods, as `laconic bench step` names them."""
    ranks, _ = on_hosts(2, link, run_rank, (workload, link, period, blocks))
    alone, step = (timing("step", slowest([rank[name] for rank in ranks])) for name in (ALONE, NAME))
    sent = max(sum(rank[NAME].get(SENT, [0.0])) / blocks for rank in ranks)
    row = {"config": TORCHFT, **step, "compute_seconds": alone["step_seconds"], "sent_nbytes": sent}
    return {"results": [row], "configuration": {"workload": workload, "link": link or "loopback", "blocks": blocks}}


def run_rank(workload: str, link: str | None, period: int, blocks: int) -> dict[str, Figures]:
    """Both ways on this rank, in turns."""
    from torchft import Manager, ProcessGroupGloo
    from torchft._torchft import LighthouseServer
    from torchft.local_sgd import DiLoCo

    with host(timeout_s=PATIENCE.total_seconds()) as world:
        address = os.environ.get("LACONIC_BIND", "127.0.0.1")
        addresses: list[str] = [""] * world.world_size
        dist.all_gather_object(addresses, address)
        lighthouse = LighthouseServer(bind=f"0.0.0.0:{PORT}", min_replicas=2) if world.rank == 0 else None
        dist.barrier()
        task = get(workload).prepare(0, scaling="weak")
        alone = Trained(copy.copy(task), world.rank)
        trained = Trained(task, world.rank)
        store = dist.TCPStore(address, 0, is_master=True, wait_for_workers=False)
        manager = Manager(
            pg=ProcessGroupGloo(timeout=PATIENCE), load_state_dict=trained.model.load_state_dict,
            state_dict=trained.model.state_dict, min_replica_size=2, use_async_quorum=False, timeout=PATIENCE,
            quorum_timeout=PATIENCE, rank=0, world_size=1, store_addr=address, store_port=store.port,
            lighthouse_addr=f"http://{addresses[0]}:{PORT}", replica_id=str(world.rank), hostname=address,
            init_sync=False,  # all begin with the same weights; its server of them has a host's name, not its address
        )  # fmt: skip
        outer = torch.optim.SGD(trained.model.parameters(), 0.7, momentum=0.9, nesterov=True)
        with DiLoCo(manager, [trained.model], trained.optimizer, outer, sync_every=period):
            ways = {ALONE: Way(alone.step, period), NAME: Way(trained.step, period)}
            found = Turns(ways, link, dist.barrier).run(blocks)
        manager.shutdown(wait=False)
        dist.barrier()
        if lighthouse is not None:
            lighthouse.shutdown()
        return found


class Trained:
    """The workload's model and optimiser, in a plain loop."""

    def __init__(self, task: Task, rank: int) -> None:
        self._task, self._rank, self._step = task, rank, 0
        self.model = copy.deepcopy(task.model)
        self.optimizer = task.optimizer(self.model.parameters())

    def step(self) -> None:
        """Train one step."""
        task, rank = self._task, self._rank
        epoch, step = divmod(self._step, task.steps_per_epoch(2))
        task.begin_step(self.optimizer, epoch, step, rank, 2)
        self.optimizer.zero_grad()
        task.loss(self.model, task.batch(epoch, step, rank, 2)).backward()  # type: ignore[no-untyped-call]
        self.optimizer.step()
        self._step += 1
