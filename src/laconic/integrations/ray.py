"""Ray Train: `prepare_model` as Ray's own, with gradients through a codec, and `train_loop` around the loop.

    def loop(config):
        model = prepare_model(model, "dynamic8")          # instead of ray.train.torch.prepare_model
        …

    TorchTrainer(train_loop(loop), scaling_config=ScalingConfig(num_workers=4)).fit()
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from laconic.errors import BadInput, MissingExtra
from laconic.exchange.job import Job
from laconic.integrations.doors import load_state, open_door, save_state

try:
    import ray.train.torch as ray_torch
except ImportError as error:
    raise MissingExtra("ray", "ray") from error

_jobs: weakref.WeakKeyDictionary[nn.Module, Job] = weakref.WeakKeyDictionary()


def prepare_model(
    model: nn.Module,
    codec: Any = None,
    *,
    move_to_device: Any = True,
    parallel_strategy_kwargs: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Prepare a model as `ray.train.torch.prepare_model` does, by DDP, and send its gradients through `codec`.

    A single worker gets the model as it is.

    Args:
        codec, options: as for `laconic.compress`.
        move_to_device, parallel_strategy_kwargs: Ray's own.
    """
    made: nn.Module = ray_torch.prepare_model(
        model, move_to_device, parallel_strategy="ddp", parallel_strategy_kwargs=parallel_strategy_kwargs
    )
    if isinstance(made, DistributedDataParallel):
        _jobs[made] = open_door("compress", made, None, codec, options)
    return made


def job_of(model: nn.Module) -> Job:
    """The job of a model that `prepare_model` returned, for `metrics` and `explain`."""
    if model not in _jobs:
        raise BadInput("this model has no job: prepare_model of laconic.integrations.ray did not make it, or is alone")
    return _jobs[model]


def save_residuals(model: nn.Module, folder: str | Path) -> None:
    """Keep the residuals of all workers in a checkpoint's folder of rank 0; all workers call it.

    A worker alone has none.
    """
    if model in _jobs:
        save_state(_jobs[model], folder, writes=dist.get_rank() == 0)


def load_residuals(model: nn.Module, folder: str | Path) -> None:
    """Go on from such a folder; all workers call it, each with the checkpoint that Ray gave it."""
    if model in _jobs:
        load_state(_jobs[model], [folder])


def train_loop(loop: Callable[..., Any]) -> Callable[..., Any]:
    """The same loop for a TorchTrainer, which closes the jobs of its models when it ends, by an exception, too."""
    return functools.partial(_closing, loop)  # Ray sends it to its workers, and a closure would take `_jobs` along


def _closing(loop: Callable[..., Any], config: dict[str, Any]) -> Any:
    try:
        found = loop(config) if inspect.signature(loop).parameters else loop()
        for job in list(_jobs.values()):
            job.finish()
        return found
    finally:
        while _jobs:
            _jobs.popitem()[1].close()
