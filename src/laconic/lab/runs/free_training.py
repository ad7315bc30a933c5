"""Training in which no worker waits for another: each takes the next share of a batch as soon as it is ready.

Callers: `trainer.run_rank`, in comparisons, for modes that are not in lockstep (asynchronous servers, Hogwild). All
shares of all batches of all epochs are used exactly once, so the budget of samples is that of every other mode; a slow
worker does fewer of them.

Rank 0 keeps a copy of its weights whenever an epoch's shares have been handed out, and evaluates the copies when all is
over: an evaluation during the training would stop its clock while the others train on. A step in the record is P
shares, whoever did them, and takes from the end of the one before to its own.
"""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch

from laconic.exchange.collectives import all_gather, barrier
from laconic.lab.runs.budget import Budget, budget_of
from laconic.lab.records.metrics import Metrics
from laconic.lab.runs.trainer import Ended, Training
from laconic.lab.runs.trial import COLUMNS, Figures


class FreeTraining(Training):
    """One rank that takes shares until there are none."""

    def run(self) -> Ended:
        assert self.folder is not None  # as `_training` sees to
        size = self.world.world_size
        budget = Budget(budget_of(self.folder, self.plan.order), self.total_steps * size)
        metrics = Metrics(self.folder) if self.world.rank == 0 else None
        copies: list[dict[str, Any]] = []
        self._sent_before = self._interface_nbytes()
        self._ends: list[float] = []
        barrier(group=self.world)
        begun = time.perf_counter()
        while (unit := budget.take()) is not None:
            at, share = divmod(unit, size)
            if self.world.rank == 0 and at // self.steps_per_epoch > len(copies):
                copies.append(self._copy())
            self.rows.append(self._one_step(*divmod(at, self.steps_per_epoch), share))
            self._ends.append(time.perf_counter() - begun)
            self.step = at + 1
            if metrics is not None:
                self._show(metrics)
        self._finish()
        self._ends.append(time.perf_counter() - begun)
        budget.close()
        barrier(group=self.world)
        if self.world.rank == 0:
            budget.remove()
            copies = copies[: self.workload.epochs - 1]
            self._evaluate_all([*copies, self._copy()], metrics)
        barrier(group=self.world)
        return Ended(self.total_steps, self._trial())

    def _finish(self) -> None:
        if self.rows:
            super()._finish()
        elif self.trainee.agreement is not None:  # this worker was too late for any share
            self.trainee.agreement.finish()

    def _copy(self) -> dict[str, Any]:
        return {name: value.clone() for name, value in self.trainee.module.state_dict().items()}

    def _evaluate_all(self, copies: list[dict[str, Any]], metrics: Metrics | None) -> None:
        """Test every epoch's copy; the last is what the training gave, and stays in the model."""
        for number, copy in enumerate(copies, start=1):
            self.trainee.module.load_state_dict(copy)
            self.step = self.total_steps if number == len(copies) else number * self.steps_per_epoch
            self._evaluate(metrics)

    def _figures(self) -> Figures:
        """All ranks' shares in the order they ended, P to a step; the end of a training counts to the last."""
        size = self.world.world_size
        counts = all_gather(torch.tensor([len(self.rows)]), group=self.world).reshape(-1).tolist()
        padded = torch.zeros(max(counts), len(COLUMNS) + 1, dtype=torch.float64)
        if self.rows:
            mine = torch.tensor(self.rows, dtype=torch.float64)
            padded[: len(mine)] = torch.cat([mine, torch.tensor(self._ends[:-1]).double()[:, None]], 1)
        every = all_gather(padded, group=self.world)
        last_s = float(all_gather(torch.tensor([self._ends[-1]]).double(), group=self.world).max())
        rows = torch.cat([part[:count] for part, count in zip(every, counts, strict=True)]).numpy()
        rows = rows[np.argsort(rows[:, -1], kind="stable")].reshape(self.total_steps, size, len(COLUMNS) + 1)
        ends = rows[:, -1, -1].copy()
        ends[-1] = last_s
        figures = rows[:, :, :-1].transpose(1, 0, 2).copy()
        figures[:, :, 0] = np.diff(ends, prepend=0.0)
        return figures
