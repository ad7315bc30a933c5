"""Accelerate: one line after `prepare`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from laconic.errors import BadInput, MissingExtra
from laconic.exchange.job import Job
from laconic.exchange.shared_state import SharedState
from laconic.integrations.doors import Door, check_door, open_door

try:
    from accelerate import Accelerator
except ImportError as error:
    raise MissingExtra("accelerate", "huggingface") from error


def accelerated(
    accelerator: Accelerator,
    model: nn.Module,
    codec: Any = None,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    door: Door = "compress",
    **options: Any,
) -> Job:
    """Send the gradients of a model that `prepare` has returned through `codec`; `save_state` keeps the residuals.

    Args:
        optimizer: what `prepare` returned for it, for door="distribute".
        door, options: "compress" or "distribute", and its options.

    Raises:
        BadInput: `prepare` has not made a DDP or FSDP2 model: one process, or another plug-in.
    """
    check_door(door)
    if accelerator.num_processes == 1:
        raise BadInput("there is nobody to exchange gradients with: start the script by torchrun or accelerate launch")
    job = open_door(door, model, optimizer, codec, options)
    accelerator.register_for_checkpointing(SharedState(job))
    return job
