"""What the integrations share: one call for both doors, and a job's state in a checkpoint that rank 0 writes."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from torch import nn

from laconic.consistency.base import Agreement
from laconic.consistency.distribute import distribute
from laconic.consistency.hooks import KEY
from laconic.errors import BadInput, UnknownName
from laconic.exchange.hook import compress
from laconic.exchange.job import Job
from laconic.exchange.shared_state import SharedState

Door = Literal["compress", "distribute"]
DOORS = ("compress", "distribute")
FILE = "laconic.pt"


def check_door(door: str) -> None:
    """Refuse a door that there is not, when the integration is made and not in the first step."""
    if door not in DOORS:
        raise UnknownName("door", door, DOORS)


def open_door(
    door: Door, model: nn.Module, optimizer: torch.optim.Optimizer | None, codec: Any, options: Mapping[str, Any]
) -> Job:
    """Send the gradients of a framework's wrapped model through `codec`, by `compress` or overlapped `distribute`."""
    if door == "compress":
        return compress(model, codec, **options)
    if optimizer is None:
        raise BadInput("distribute needs the optimiser, and this framework has made none")
    job = distribute(model, optimizer, codec=codec, **options)
    _keep_apart(job)
    return job


def _keep_apart(job: Agreement) -> None:
    """Leave the job's state out of its optimiser's, which frameworks save of one rank and load on all."""

    def strip(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        for each in (state, *state["param_groups"]):
            each.pop(KEY, None)

    job.resources.callback(job.optimizer.register_state_dict_post_hook(strip).remove)


def save_state(job: Job, folder: str | Path, *, writes: bool) -> None:
    """Keep the residuals of all ranks in a checkpoint's folder; called by all, written where `writes`."""
    kept = SharedState(job).state_dict()
    if writes:
        torch.save(kept, Path(folder) / FILE)


def load_state(job: Job, folders: list[str | Path]) -> None:
    """Give a job its state back from the first of these checkpoints that has one; a warning where none has."""
    for folder in folders:
        if (path := Path(folder) / FILE).exists():
            return SharedState(job).load_state_dict(torch.load(path, weights_only=True))
    looked = ", ".join(str(Path(folder) / FILE) for folder in folders)
    text = f"residuals begin at zero: the checkpoint has no state of the job (looked for {looked})"
    warnings.warn(text, stacklevel=3)


def metrics_of(job: Job) -> dict[str, float]:
    """A job's metrics under names that no other has, for a framework's loggers: numbers only."""
    return {f"laconic/{name}": value for name, value in job.metrics().items() if not isinstance(value, str)}
