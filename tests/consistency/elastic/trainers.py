"""Workers of an elastic training in threads of one process, for tests: quick to start, and easy to look into."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import laconic

SAMPLES, BATCH, EPOCHS = 256, 32, 12


def problem() -> tuple[nn.Module, Tensor, Tensor]:
    """A model, always the same, its inputs and its classes; a fifth of a second to learn."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 40, generator=generator)
    y = (x @ torch.randn(40, 4, generator=generator)).argmax(1)
    model = nn.Sequential(nn.Linear(40, 48), nn.Tanh(), nn.Linear(48, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return model, x, y


class Training(threading.Thread):
    """A thread that trains, and whose error the test can show."""

    error: BaseException | None = None

    def run(self) -> None:
        try:
            self._train()
        except Exception as error:  # shown by the test
            self.error = error

    def _train(self) -> None:
        raise NotImplementedError


class Trainer(Training):
    """A worker.

    Args:
        leave_after: leave after so many calls of `step()`, wherever that is.
        spoil: what it does to its gradients.
        prepare: what it does to its job before it begins.
        options: of `laconic.elastic`.

    Attributes:
        digests: its checksum after each committed step.
        recorded: the steps that its job has recorded, at the end.
        loss: over all samples, at the end.
        error: what ended it.
    """

    def __init__(
        self,
        folder: Path,
        leave_after: int | None = None,
        spoil: Callable[[Tensor], Any] | None = None,
        prepare: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        super().__init__(daemon=True)
        self.folder, self.leave_after, self.options = folder, leave_after, options
        self.spoil, self.prepare = spoil, prepare
        self.digests: dict[int, int] = {}
        self.loss, self.calls, self.sent_nbytes = 0.0, 0, 0
        self.recorded: list[int] = []
        self.weights = torch.empty(0)
        self.start()

    def _train(self) -> None:
        model, x, y = problem()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        settings = {"data": laconic.Samples(SAMPLES, BATCH, EPOCHS), "codec": "none", "patience_s": 20.0}
        with laconic.elastic(model, optimizer, meeting=self.folder, **(settings | self.options)) as job:
            job._deadline.floor_s = 1.0  # a crowded machine
            if self.prepare is not None:
                self.prepare(job)
            for batch in job.batches():
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                for parameter in model.parameters() if self.spoil is not None else ():
                    self.spoil(parameter.grad)  # type: ignore[misc]
                time.sleep(0.002)  # leaves the cores to others
                before = job.steps
                self.calls += 1
                if job.step() and job.steps != before:
                    self.digests[job.steps] = job.digest
                if self.calls == self.leave_after:
                    return
            self.sent_nbytes = sum(record.sent_nbytes for record in job.records)
            self.recorded = [record.step for record in job.records]
        with torch.no_grad():
            self.loss = float(nn.functional.cross_entropy(model(x), y))
        self.weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])

    def ended(self) -> None:
        """Wait for its end; an error of its own is raised here."""
        self.join(100)
        assert not self.is_alive()
        assert self.error is None, self.error


def come_and_go(folder: Path, leave_after: int = 30, **options: Any) -> list[Trainer]:
    """Three workers, of whom the first, the coordinator, leaves on the way, and one that comes later."""
    workers = [Trainer(folder, leave_after, workers=3, **options)]
    until(lambda: (folder / "view-00000001.json").exists())
    workers += [Trainer(folder, workers=3, **options) for _ in range(2)]
    until(lambda: workers[1].calls > 8 or workers[1].error)
    workers.append(Trainer(folder, **options))
    for worker in workers:
        worker.ended()
    return workers


def assert_alike(workers: Sequence[Trainer]) -> None:
    """Whoever has committed the same step holds the same bits; a step that came in a peer's state is not compared."""
    for worker in workers[1:]:
        common = worker.digests.keys() & workers[0].digests.keys()
        assert common, "no step that both have committed"
        for step in sorted(common):
            assert worker.digests[step] == workers[0].digests[step], f"different weights after step {step}"


def until(true: Callable[[], Any], limit_s: float = 100.0) -> None:
    """Wait until something is true."""
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline
        time.sleep(0.005)
