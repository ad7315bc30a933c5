"""Checkpoints of any training: the state to resume a worker to the bit, in files that are written atomically.

Callers: users (`laconic.Checkpoints`). Each worker writes its own file (`storage/checkpoints.py`), since its residuals
are its own; workers agree on the newest step that all of them have. `save` copies and returns; a thread writes.

Invariants: one write is under way at a time, so workers in lockstep are at most two checkpoints apart, and with
`keep` ≥ 3 all have the files of one common step; the thread does not outlive `close`.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import BadInput, CheckpointError, LaconicError, StorageError
from laconic.exchange.collectives import all_gather, barrier
from laconic.exchange.hook import jobs_of
from laconic.exchange.job import Job
from laconic.storage.checkpoints import MOST_STEPS, CheckpointFiles, random_state, set_random_state
from laconic.storage.files import writing
from laconic.storage.form import check_like
from laconic.storage.tree import check, map_tensors
from laconic.transports.world import World, current
from laconic.workloads.order import part, permutation

WRITING_S = 1800.0  # longer than any checkpoint takes to write
SLOTS = 9  # newest whole checkpoints that workers tell each other of
BEGINNING = 2  # by how many checkpoints one worker can be ahead of one that has none yet


@dataclass(frozen=True)
class Restored:
    """A checkpoint's other parts, besides model, optimiser and random state; the cursor as its state."""

    step: int
    cursor: Any
    extra: Any


class Checkpoints:
    """A folder of one training's checkpoints; every worker makes one and calls the same methods at the same steps.

    Args:
        folder: created if missing; shared by all workers, or each worker's own.
        keep: how many checkpoints stay; older ones are removed after a newer one is written, but for the newest that
            all workers have in the folder.
        world: the workers; the default world when None.
        asynchronous: write on a thread; False writes within `save`.

    >>> import tempfile
    >>> from torch import nn
    >>> import laconic
    >>> model = nn.Linear(2, 1)
    >>> with tempfile.TemporaryDirectory() as folder, laconic.Checkpoints(folder) as checkpoints:
    ...     checkpoints.save(7, model=model, cursor={"epoch": 0, "position": 7})
    ...     found = checkpoints.restore(model=model)
    >>> found.step, found.cursor["position"]
    (7, 7)
    """

    def __init__(
        self, folder: str | Path, keep: int = 3, *, world: World | None = None, asynchronous: bool = True
    ) -> None:
        if not isinstance(keep, int) or isinstance(keep, bool) or not 1 <= keep < SLOTS:  # and one more that all have
            raise BadInput(f"keep is a number of checkpoints from 1 to {SLOTS - 1}, got {keep!r}")
        self.asynchronous, self.world = asynchronous, world or current()
        self.files = CheckpointFiles(folder, self.world.rank, keep)
        self._writing: threading.Thread | None = None
        self._failed: BaseException | None = None
        with writing(folder, "no checkpoint was touched"):
            self.files.folder.mkdir(parents=True, exist_ok=True)
        self.files.remove_unfinished()

    def save(
        self,
        step: int,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        cursor: Any = None,
        extra: Any = None,
        job: Job | None = None,
    ) -> None:
        """Save the present state under the number `step`; returns when it is copied, not when it is written.

        Waits for the previous write, and raises its error.

        Args:
            step: a number of the caller's, greater than that of the checkpoint before.
            model: its parameters and buffers, and the residuals of what `compress` made for it.
            optimizer: its state, with the agreement's where it is distributed: residuals, momentum, servers' shares.
            cursor: where the data are: plain values and tensors, or an object with `state_dict()`.
            extra: further plain values and tensors, for example a scheduler's state_dict().
            job: the job whose state is saved; None finds what `compress` made for `model`. Needed only for a job whose
                hook was registered by hand.

        Raises:
            BadInput: something that is neither a plain value nor a tensor.
            StorageError: this write, or the one before, failed; the sentence names the newest checkpoint there is.
        """
        if not isinstance(step, int) or isinstance(step, bool) or not 0 <= step < MOST_STEPS:
            raise BadInput(f"step is a whole number from 0 to 999999999, got {step!r}")
        for name, given in (("model", model), ("optimizer", optimizer)):
            if given is not None and not hasattr(given, "state_dict"):
                raise BadInput(f"{name} must have a state_dict(), got {type(given).__name__}")
        self.wait()
        tree = {
            "step": step,
            "world_size": self.world.world_size,
            "model": None if model is None else dict(model.state_dict()),
            "optimizer": None if optimizer is None else optimizer.state_dict(),
            "cursor": cursor.state_dict() if hasattr(cursor, "state_dict") else cursor,
            "extra": extra,
            "jobs": [each.state_dict() for each in _jobs(job, model)],
            "random": random_state(),
        }
        check(tree)
        snapshot = map_tensors(tree, _copy)
        if not self.asynchronous:
            self.files.write(step, snapshot)
            return
        self._writing = threading.Thread(target=self._try, args=(step, snapshot), name="laconic-checkpoint")
        self._writing.start()

    def wait(self) -> None:
        """Wait until the last `save` is on disk; raises its error.

        Raises:
            StorageError: the write failed, or it has not ended for WRITING_S.
        """
        if self._writing is not None:
            self._writing.join(WRITING_S)
            if self._writing.is_alive():
                text = f"{self.files.folder}: a checkpoint is still being written after {WRITING_S:g} s"
                raise StorageError(f"{text}; is the file system stuck? Older checkpoints are whole")
            self._writing = None
        failed, self._failed = self._failed, None
        if failed is not None:
            raise failed

    def latest(self) -> int | None:
        """The newest step of which every worker's file is whole, None where there is no checkpoint; called by all.

        A warning names truncated or changed files.

        Raises:
            CheckpointError: there are files, but none that all workers can resume from.
        """
        self.wait()
        whole, damaged, made_by = self._own_files()
        mine = torch.full((3 + SLOTS,), -1, dtype=torch.int64)
        mine[:3] = torch.tensor([len(whole) + damaged, damaged, made_by])
        mine[3 : 3 + len(whole)] = torch.tensor(whole, dtype=torch.int64)
        told = all_gather(mine, group=self.world)
        sizes = {int(size) for size in told[:, 2] if size >= 0}
        if sizes - {self.world.world_size}:
            text = f"made by {min(sizes - {self.world.world_size})} workers, this job has {self.world.world_size}"
            raise CheckpointError(f"{self.files.folder}: the checkpoints were {text}: start as many again")
        common = set.intersection(*({int(step) for step in row[3:] if step >= 0} for row in told))
        if common:
            return max(common)
        if not told[:, 0].any():
            return None
        missing = [rank for rank, row in enumerate(told) if row[0] == 0]
        if missing and int(told[:, 0].max()) <= BEGINNING and not told[:, 1].any():
            text = f"the job ended before worker {missing[0]} had written its first checkpoint"
            warnings.warn(f"{self.files.folder}: {text}; starting from the beginning", stacklevel=2)
            return None
        text = f"no checkpoint is whole on all {self.world.world_size} workers"
        counts = f"of {int(told[:, 0].sum())} files {int(told[:, 1].sum())} are cut off or changed"
        raise CheckpointError(f"{self.files.folder}: {text}; {counts}")

    def restore(
        self,
        *,
        model: nn.Module | None = None,
        optimizer: torch.optim.Optimizer | None = None,
        cursor: Any = None,
        job: Job | None = None,
    ) -> Restored | None:
        """Resume from the newest whole checkpoint: load it into the arguments, and the random state; called by all.

        Returns None, and changes nothing, if there is no checkpoint. Files newer than the one loaded are removed: their
        training is abandoned.

        What is given has the shape of what `save` was given, an optimiser also the mode; a cursor has
        `load_state_dict()`. Call `compress` before, so that its job gets its residuals back; `job` as for `save`.

        Raises:
            CheckpointError: as `latest`; or the checkpoint holds no such part, or one that does not fit what is given.
        """
        step = self.latest()
        if step is None:
            return None
        kept = self.files.read(step, "model", "optimizer", "cursor", "random", "extra")
        for name, given in (("model", model), ("optimizer", optimizer), ("cursor", cursor)):
            if given is None:
                continue
            if kept[name] is None:
                raise CheckpointError(f"{self.files.path(step)} holds no {name}")
            with self._fitting(step, name):
                given.load_state_dict(kept[name])
        self._load_jobs(step, kept.get("jobs", []), _jobs(job, model))
        with self._fitting(step, "random state"):
            set_random_state(kept["random"])
        self.files.remove_after(step)
        barrier(group=self.world)  # nobody trains on what another is about to restore: shared weights, servers' shards
        return Restored(step, kept["cursor"], kept["extra"])

    def _load_jobs(self, step: int, states: list[Any], jobs: list[Job]) -> None:
        """Give each job its state; warn where one side has none, since residuals are lost."""
        path = self.files.path(step)
        if jobs and not states:
            text = "holds no state of the job that compresses the model"
            warnings.warn(f"{path} {text}: its residuals begin at zero, unless you load them yourself", stacklevel=3)
            return
        if states and not jobs:
            text = "holds residuals of a compressed model, and the model given is not compressed"
            warnings.warn(f"{path} {text}: they are left out; call compress before restore", stacklevel=3)
            return
        if len(states) != len(jobs):
            raise CheckpointError(f"{path} holds the state of {len(states)} jobs, and the model given has {len(jobs)}")
        for each, state in zip(jobs, states, strict=True):
            with self._fitting(step, "job"):
                each.load_state_dict(state)

    @contextlib.contextmanager
    def _fitting(self, step: int, name: str) -> Iterator[None]:
        """Turn torch's errors about a state of another form into one CheckpointError that names the file."""
        try:
            yield
        except LaconicError:
            raise
        except (AttributeError, IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
            why = " ".join(str(error).split())
            raise CheckpointError(f"{self.files.path(step)}: its {name} does not fit what is given: {why}") from error

    def close(self) -> None:
        """Wait for the last write and end its thread; safe to call twice."""
        self.wait()

    def __enter__(self) -> Checkpoints:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _try(self, step: int, tree: Any) -> None:
        try:
            self.files.write(step, tree)
        except BaseException as error:  # raised by the next wait()
            self._failed = error

    def _own_files(self) -> tuple[list[int], int, int]:
        """This worker's steps whose file is whole, newest first; how many files are not; how many workers made them.

        A single worker needs only its newest; several may have to go back to one that all have.
        """
        whole: list[int] = []
        damaged, made_by = 0, -1
        for step, kept in self.files.newest_first(SLOTS):
            size = kept.get("world_size") if isinstance(kept, dict) else None
            if not isinstance(size, int) or not 0 < size < 1 << 31:
                damaged += 1
                continue
            made_by = max(made_by, size)
            whole.append(step)
            if self.world.world_size == 1:
                break
        return whole, damaged, made_by


def _jobs(job: Job | None, model: nn.Module | None) -> list[Job]:
    if job is not None:
        return [job]
    return jobs_of(model) if isinstance(model, nn.Module) else []


def _copy(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


class Cursor:
    """This worker's row numbers, below `numel`, of every batch, endlessly, in the order of the seed and the epoch.

    A batch is `batch` samples over all workers, of which each takes a part; a last batch with fewer is left out, and
    the next epoch begins. Where `batch` divides `numel` these are the batches of a workload and of an elastic job.

    >>> cursor = Cursor(6, batch=2)
    >>> _ = next(cursor)
    >>> kept = cursor.state_dict()
    >>> kept
    {'epoch': 0, 'position': 2, 'numel': 6, 'seed': 0}
    >>> coming = next(cursor)
    >>> cursor.load_state_dict(kept)
    >>> next(cursor).equal(coming)
    True
    """

    def __init__(self, numel: int, *, batch: int, seed: int = 0, world: World | None = None) -> None:
        world = world or current()
        self.rank, self.world_size = world.rank, world.world_size
        if not self.world_size <= batch <= numel:
            text = f"at least one sample for each of {self.world_size} workers and at most {numel}, the data"
            raise BadInput(f"batch is the samples of a step over all workers: {text}, got {batch}")
        if seed < 0:
            raise BadInput(f"a seed is a whole number ≥ 0, got {seed}")
        self.numel, self.batch, self.seed = numel, batch, seed
        self.epoch = self.position = 0
        self._order: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.position + self.batch > self.numel:
            self.epoch, self.position = self.epoch + 1, 0
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, permutation(self.numel, self.seed, self.epoch)
        rows = self._order[1][self.position : self.position + self.batch]
        self.position += self.batch
        return rows[slice(*part(self.batch, self.rank, self.world_size))]

    def state_dict(self) -> dict[str, int]:
        """The position, as plain numbers."""
        return {"epoch": self.epoch, "position": self.position, "numel": self.numel, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved position; BadInput if it is of other data or another order."""
        check_like(state, {"epoch": 0, "position": 0, "numel": 0, "seed": 0}, "the cursor's state")
        if (state["numel"], state["seed"]) != (self.numel, self.seed):
            theirs = f"{state['numel']} samples by seed {state['seed']}"
            raise BadInput(f"the cursor was saved in {theirs}; this one reads {self.numel} by seed {self.seed}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
