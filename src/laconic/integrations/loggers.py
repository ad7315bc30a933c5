"""Metrics of a job while it runs, to TensorBoard, Weights & Biases, MLflow, or a file of JSON lines.

    log = JsonLines("run.jsonl")          # `laconic watch run.jsonl` shows it live
    …
    log(job, loss=loss.item())            # after every step; written every tenth

Rank 0 of the job writes, and the others do nothing; each member of an elastic job writes its own. Each log imports its
package when it is made.
"""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from math import isfinite
from pathlib import Path
from typing import Any

import torch.distributed as dist

from laconic.errors import BadInput, MissingExtra
from laconic.exchange.job import Job
from laconic.storage.files import writing
from laconic.transports.world import World


class MetricsLog(ABC):
    """Writes a job's metrics every so many calls; call it after every step.

    Args:
        every: how many calls apart metrics are written.
    """

    def __init__(self, every: int = 10) -> None:
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise BadInput(f"every is a whole number of at least 1, got {every!r}")
        self._every, self._calls = every, 0

    def __call__(self, job: Job, **others: float) -> None:
        """Write the job's metrics, and `others` such as the loss, if it is time."""
        self._calls += 1
        if self._calls % self._every or not _writes(job):
            return
        found = {f"laconic/{name}": value for name, value in job.metrics().items()}
        self.write(self._calls, {**others, **found})

    @abstractmethod
    def write(self, step: int, found: Mapping[str, float | str]) -> None:
        """Write what was found after `step` calls."""

    def close(self) -> None:  # noqa: B027 - most have nothing to close
        """Leave the file whole."""


def _writes(job: Job) -> bool:
    """Whether this process has rank 0: of torch.distributed, or else of all ranks that the job's world is of."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    world: World | None = getattr(job, "world", None)
    return world is None or world.transport.whole.rank == 0


def _numbers(found: Mapping[str, float | str]) -> dict[str, float]:
    return {name: value for name, value in found.items() if not isinstance(value, str)}


class JsonLines(MetricsLog):
    """A line of JSON each time: `at` (seconds since 1970), `step`, and the metrics; appended to the file."""

    def __init__(self, path: str | Path, *, every: int = 10) -> None:
        super().__init__(every)
        self._path = Path(path)

    def write(self, step: int, found: Mapping[str, float | str]) -> None:
        sane = {name: v if isinstance(v, str) or isfinite(v) else str(v) for name, v in found.items()}
        line = json.dumps({"at": time.time(), "step": step, **sane})
        with writing(self._path), self._path.open("a", encoding="utf-8") as file:
            file.write(line + "\n")


class TensorBoard(MetricsLog):
    """Scalars in a folder, or by a SummaryWriter of yours."""

    def __init__(self, folder: Any, *, every: int = 10) -> None:
        super().__init__(every)
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError as error:
            raise MissingExtra("tensorboard", "tensorboard") from error
        self._folder, self._open = folder, SummaryWriter
        self._writer: Any = None if isinstance(folder, str | Path) else folder

    def write(self, step: int, found: Mapping[str, float | str]) -> None:
        if self._writer is None:  # it makes a file at once, and other ranks make none
            self._writer = self._open(str(self._folder))
        for name, value in found.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, step)
            else:
                self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()


class WeightsAndBiases(MetricsLog):
    """Weights & Biases, by the run that is under way, or the one given."""

    def __init__(self, run: Any = None, *, every: int = 10) -> None:
        super().__init__(every)
        try:
            import wandb
        except ImportError as error:
            raise MissingExtra("wandb", "wandb") from error
        self._run, self._wandb = run, wandb

    def write(self, step: int, found: Mapping[str, float | str]) -> None:
        run = self._run or self._wandb.run
        if run is None:  # other ranks need none
            raise BadInput("there is no run of Weights & Biases; call wandb.init(…) on rank 0 first")
        run.log(dict(found), step=step)


class MLflow(MetricsLog):
    """MLflow, in the run that is active."""

    def __init__(self, *, every: int = 10) -> None:
        super().__init__(every)
        try:
            import mlflow
        except ImportError as error:
            raise MissingExtra("mlflow", "mlflow") from error
        self._mlflow: Any = mlflow

    def write(self, step: int, found: Mapping[str, float | str]) -> None:
        self._mlflow.log_metrics(_numbers(found), step=step)
