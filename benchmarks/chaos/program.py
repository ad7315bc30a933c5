"""What every rank of a chaos job does: train a small model by one mode on one engine, and write down how that went.

Callers: `launch.py`, through the launcher of local ranks, a cluster of namespaces or `mpiexec`. Each rank appends lines
of JSON to `rank{r}.jsonl` in the task's folder: its process, every step, and one line with its end, which is what the
judge reads. The batches are a function of seed, rank and step, so that two trainings can be compared bit for bit.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import sys
import threading
import time
import warnings
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic
from laconic.errors import LaconicError
from laconic.transports.threads import run_threads
from laconic.transports.world import World

EVERY = 5  # steps between two checkpoints
_ONE_AT_A_TIME = threading.Lock()  # ranks that are threads share torch's generator
SAMPLES = 12  # of a step over all workers of an elastic job


@dataclass(frozen=True)
class Task:
    """What a job does; plain values, for they travel to other processes.

    Attributes:
        engine: gloo, zmq, mpi or threads through `laconic.distribute`; elastic for the other door.
        pace_s: how long every step takes at least, so that faults fall into the training.
        checkpoints: a folder; a rank goes on from what it holds, and saves there.
        file_nbytes: the size beyond which no rank can write a file, once there is a file "full" in the folder.
        workers: how many an elastic job's first step waits for; None: all.
    """

    folder: str
    engine: str
    mode: str
    codec: str
    ranks: int
    seed: int = 0
    steps: int = 40
    pace_s: float = 0.02
    timeout_s: float = 6.0
    checkpoints: str | None = None
    file_nbytes: int | None = None
    workers: int | None = None


class Late(LaconicError):
    """An elastic training ended without this worker, whose model is not the final one, as its job says."""


class Left(BaseException):
    """A rank that is a thread was killed."""


class Notes:
    """What one rank writes down."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank = task, rank
        self._path = Path(task.folder, f"rank{rank}.jsonl")

    def add(self, **values: Any) -> None:
        """One line, in one write."""
        line = json.dumps({"t": time.monotonic(), **values}) + "\n"
        descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def error(self, error: BaseException) -> None:
        """The end of a rank that raised; `typed` where the error is one that Laconic raises on purpose."""
        kinds = [kind.__name__ for kind in type(error).__mro__]
        typed, peer = isinstance(error, LaconicError), getattr(error, "peer", None)
        self.add(end="error", kind=kinds[0], kinds=kinds, text=str(error)[:400], typed=typed, peer=peer)

    def heed(self) -> None:
        """What a signal is to a process: a thread finds it in the folder. A limit on files begins here, too."""
        task = self.task
        if task.engine == "threads":
            if Path(task.folder, f"kill{self.rank}").exists():
                raise Left
            while Path(task.folder, f"stop{self.rank}").exists():
                time.sleep(0.02)
        if task.file_nbytes is not None and Path(task.folder, "full").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (task.file_nbytes, resource.RLIM_INFINITY))


def network(seed: int) -> nn.Module:
    """The first layer is large enough for codecs, the rest is exempt from them."""
    with _ONE_AT_A_TIME:
        torch.manual_seed(seed)
        return nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 10))


def digest(model: nn.Module) -> int:
    """A checksum of all weights."""
    return zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))


def loss(model: nn.Module, seed: int, rank: int, step: int) -> Tensor:
    """Of this rank's batch at this step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + rank)
    x, y = torch.randn(8, 32, generator=generator), torch.randint(0, 10, (8,), generator=generator)
    return nn.functional.cross_entropy(model(x), y)


def train(task: Task, world: World, notes: Notes) -> nn.Module:
    """Train through `laconic.distribute`, as a user's script does."""
    model = network(task.seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)
    mode = laconic.consistency.build(task.mode)
    codec = None if mode.no_codec else task.codec
    # `auto` measures, and may choose otherwise the next time
    fixed = {"algorithm": "ring"} if codec and "algorithm" in mode.options else {}
    job = laconic.distribute(model, optimizer, consistency=mode, codec=codec, world=world, **fixed)
    try:
        begin, checkpoints = 0, None
        if task.checkpoints is not None:
            checkpoints = laconic.Checkpoints(task.checkpoints, world=world, keep=3, asynchronous=False)
            found = checkpoints.restore(model=model, optimizer=optimizer)
            begin = 0 if found is None else found.step
        notes.add(begin=begin)
        for step in range(begin, 0 if getattr(job, "serves_only", False) else task.steps):
            notes.heed()
            optimizer.zero_grad()
            loss(model, task.seed, world.rank, step).backward()
            optimizer.step()
            notes.add(step=step + 1)
            if checkpoints is not None and (step + 1) % EVERY == 0:
                save(checkpoints, step + 1, notes, model=model, optimizer=optimizer)
            time.sleep(task.pace_s)
        notes.add(step=task.steps + 1)  # about to finish
        job.finish()
        return model
    finally:
        job.close()


def save(checkpoints: Any, step: int, notes: Notes, **parts: Any) -> None:
    """Save, and go on without where that is refused as it should be: by an error of ours, or a warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            checkpoints.save(step, **parts)
            notes.add(saved=step, warned=[str(each.message)[:300] for each in told])
        except LaconicError as error:
            notes.add(unsaved=step, text=str(error)[:300])


def train_elastic(task: Task, notes: Notes) -> nn.Module:
    """Train through `laconic.elastic`."""
    model = network(task.seed)
    optimizer = torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)
    samples = laconic.Samples(SAMPLES * task.steps, SAMPLES, epochs=1, seed=task.seed)
    meeting = task.checkpoints or str(Path(task.folder, "meeting"))
    first = {"workers": task.workers or task.ranks, "patience_s": task.timeout_s}
    with laconic.elastic(
        model, optimizer, samples, meeting, consistency=task.mode, codec=task.codec, **first
    ) as job:
        notes.add(begin=job.steps)
        for batch in job.batches():
            numbers = [int(each) for each in batch]
            if numbers:
                torch.stack([loss(model, task.seed, 0, each) for each in numbers]).mean().backward()
            if job.step():
                notes.add(step=job.steps)
            time.sleep(task.pace_s)
    if not job.finished:
        raise Late("the training ended without this worker")
    return model


def attempt(notes: Notes, work: Callable[[], nn.Module]) -> None:
    """Do it, and write down the end."""
    notes.add(pid=os.getpid())
    try:
        model = work()
    except Exception as error:
        notes.error(error)
    else:
        finite = all(bool(p.isfinite().all()) for p in model.parameters())
        notes.add(end="finished", digest=digest(model), finite=finite)


def _as_thread(task: Task, transport: Any) -> None:
    notes = Notes(task, transport.rank)

    def work() -> nn.Module:
        with World(transport) as world:
            return train(task, world, notes)

    try:
        attempt(notes, work)
    except Left:
        transport.close()


def run(values: dict[str, Any]) -> None:
    """One process of a job."""
    task = Task(**values)
    torch.set_num_threads(1)
    if task.engine == "threads":
        run_threads(task.ranks, lambda transport: _as_thread(task, transport), task.timeout_s)
        return
    if task.engine == "mpi":
        from mpi4py import MPI

        rank = MPI.COMM_WORLD.Get_rank()
    else:
        rank = int(os.environ["RANK"])
    notes = Notes(task, rank)

    def work() -> nn.Module:
        if task.engine == "elastic":
            return train_elastic(task, notes)
        with laconic.init(task.engine, timeout_s=task.timeout_s) as world:
            return train(task, world, notes)

    attempt(notes, work)


def values_of(task: Task) -> dict[str, Any]:
    """The task as it travels."""
    return dataclasses.asdict(task)


if __name__ == "__main__":
    run(json.loads(sys.argv[1]))
