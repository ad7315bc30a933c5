"""What every process of a chaos job does: go through one door, in one rank, and write down how that went.

Callers: `launch.py`, through the launcher of local ranks, a cluster of namespaces or `mpiexec`.
"""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

import laconic
from benchmarks.chaos import loop, phases
from benchmarks.chaos.doors import DOORS
from benchmarks.chaos.task import Left, Notes, Task
from laconic.transports.threads import run_threads
from laconic.transports.world import World


def attempt(notes: Notes, work: Callable[[], Iterable[Tensor]]) -> None:
    """Do it, and write down the end."""
    notes.add(pid=os.getpid())
    try:
        values = list(work())
    except Exception as error:
        notes.error(error)
    else:
        finite = all(bool(each.isfinite().all()) for each in values)
        peak_nbytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10
        notes.add(end="finished", digest=loop.digest(values), finite=finite, peak_nbytes=peak_nbytes)


def _as_thread(task: Task, transport: Any) -> None:
    notes = Notes(task, transport.rank)

    def work() -> Iterable[Tensor]:
        with World(transport) as world:
            return DOORS[task.door].run(task, world, notes)

    try:
        attempt(notes, work)
    except Left:
        transport.close()


def run(values: dict[str, Any]) -> None:
    """One process of a job."""
    task = Task.of(values)
    torch.set_num_threads(1)
    if task.engine == "threads":
        run_threads(task.ranks, lambda transport: _as_thread(task, transport), task.timeout_s)
        return
    if task.engine == "mpi":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    else:
        rank = int(os.environ.get("RANK", "0"))
    notes, door = Notes(task, rank), DOORS[task.door]

    def work() -> Iterable[Tensor]:
        phases.install(notes)
        if not door.joins:
            return door.run(task, None, notes)
        with laconic.init(task.engine, timeout_s=task.timeout_s) as world:
            return door.run(task, world, notes)

    attempt(notes, work)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
