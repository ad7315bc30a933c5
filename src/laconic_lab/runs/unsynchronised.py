"""Training in which no worker waits for another: each takes the next share of a batch as soon as it is ready.

Callers: `workers.py`, in comparisons, for modes that are not in lockstep (asynchronous servers, Hogwild). All shares of
all batches of all epochs are used exactly once, so the number of samples is that of every other mode; a slow worker
does fewer of them. They are counted in a file: the workers are processes of one machine, on emulated hosts too.

Rank 0 keeps a copy of its weights whenever an epoch's shares have been handed out, and evaluates the copies when all is
over: an evaluation during the training would stop its clock while the others train on. A step in the record is P
shares, whoever did them, and takes from the end of the one before to its own.
"""

from __future__ import annotations

import fcntl
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.exchange.collectives import all_gather, barrier
from laconic.storage.files import writing
from laconic_lab.runs.trainer import Ended, RankTraining
from laconic_lab.runs.trial import Figures, StepFigures


def shares_file(folder: Path, order: int) -> Path:
    """The file of a run's `order`-th trial."""
    return folder / f".shares-{order}"


class Shares:
    """Shares 0, 1, … total − 1, each handed out once, by a counter in a file that the first worker creates."""

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total = path, total
        with writing(path):
            self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def take(self) -> int | None:
        """The next share, or None when all have been handed out."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            taken = int.from_bytes(os.pread(self._file, 8, 0), "little")
            if taken >= self.total:
                return None
            with writing(self.path, "the trial is begun again"):
                os.pwrite(self._file, (taken + 1).to_bytes(8, "little"), 0)
            return taken
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Close the file, which stays until `remove`."""
        os.close(self._file)

    def remove(self) -> None:
        """Delete the file; once, after all have closed it."""
        self.path.unlink(missing_ok=True)


class FreeTraining(RankTraining):
    """One rank that takes shares until there are none."""

    def run(self) -> Ended:
        assert self.folder is not None  # where the shares are counted
        size = self.world.world_size
        shares = Shares(shares_file(self.folder, self.trial.order), self.prepared.total_steps * size)
        copies: list[dict[str, Any]] = []
        self._ends: list[float] = []
        self.sent.restart()
        barrier(group=self.world)
        begun = time.perf_counter()
        while (taken := shares.take()) is not None:
            at, share = divmod(taken, size)
            epoch, step = self.prepared.place(at)
            if self.world.rank == 0 and epoch > len(copies):
                copies.append(self._copy())
            self.take_step(epoch, step, share)
            self._ends.append(time.perf_counter() - begun)
            self.step = at + 1
            self.show()
        self.finish()
        self._ends.append(time.perf_counter() - begun)
        shares.close()
        barrier(group=self.world)
        if self.world.rank == 0:
            shares.remove()
            self._evaluate_all([*copies[: self.prepared.workload.epochs - 1], self._copy()])
        barrier(group=self.world)
        return self.ended()

    def _copy(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.trainee.module.state_dict().items()}

    def _evaluate_all(self, copies: list[dict[str, Any]]) -> None:
        """Test every epoch's copy; the last is what the training gave, and stays in the model."""
        for number, copy in enumerate(copies, start=1):
            self.trainee.module.load_state_dict(copy)
            last = number == len(copies)
            self.step = self.prepared.total_steps if last else self.prepared.ends[number - 1]
            self.evaluate()

    def figures(self) -> Figures:
        """All ranks' shares in the order they ended, P to a step; the end of a training counts to the last."""
        size, width = self.world.world_size, len(StepFigures._fields)
        counts = all_gather(torch.tensor([len(self.rows)]), group=self.world).reshape(-1).tolist()
        padded = torch.zeros(max(counts), width + 1, dtype=torch.float64)
        if self.rows:
            mine = torch.tensor(self.rows, dtype=torch.float64)
            padded[: len(mine)] = torch.cat([mine, torch.tensor(self._ends[:-1]).double()[:, None]], 1)
        every = all_gather(padded, group=self.world)
        last_s = float(all_gather(torch.tensor([self._ends[-1]]).double(), group=self.world).max())
        rows = torch.cat([part[:count] for part, count in zip(every, counts, strict=True)]).numpy()
        rows = rows[np.argsort(rows[:, -1], kind="stable")].reshape(self.prepared.total_steps, size, width + 1)
        ends = rows[:, -1, -1].copy()
        ends[-1] = last_s
        figures = Figures(rows[:, :, :-1].transpose(1, 0, 2).copy())
        figures.column("seconds")[:] = np.diff(ends, prepend=0.0)
        return figures
