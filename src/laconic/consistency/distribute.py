"""`laconic.distribute(model, optimizer, consistency=…, codec=…)`: the door to every way workers can agree."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from laconic.consistency.base import INSTALLED, Agreement, Mode, build
from laconic.errors import BadInput
from laconic.exchange.policy import CodecPlan
from laconic.transports.world import World, current


def distribute(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    codec: CodecPlan = "none",
    consistency: str | Mode = "sync",
    world: World | None = None,
    **options: Any,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Let `optimizer` train `model` together with all other workers; returns both, for use as before.

    Every worker begins with rank 0's weights. Communication happens in `optimizer.step()`; learning-rate schedulers,
    gradient accumulation and `state_dict()` (which then holds the exchange's state too) work as without it. A worker
    that skips a step the others take makes them wait: under GradScaler, which skips by what one worker sees, use
    `laconic.compress` on DDP, which exchanges gradients in backward.

    Args:
        model: a plain module, not wrapped in DDP.
        optimizer: any optimiser of the model's parameters.
        codec: a spec such as "dynamic8", {first step: spec}, or a function of the step.
        consistency: when workers agree: a spec such as "sync" or "local(8)"; see `laconic.consistency.names()`.
        world: where to communicate; the default world when None.
        options: the mode's own; for sync as for `CompressionState`: algorithm, exempt, feedback, momentum, hosts.

    >>> model = nn.Linear(4, 2)
    >>> model, optimizer = distribute(model, torch.optim.SGD(model.parameters(), 0.1), codec="dynamic8")
    >>> model(torch.ones(4)).sum().backward()
    >>> optimizer.step()
    """
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise BadInput(f"distribute takes a model and its torch optimiser, got {type(optimizer).__name__}")
    mode = consistency if isinstance(consistency, Mode) else build(str(consistency))
    if isinstance(model, nn.parallel.DistributedDataParallel):
        raise BadInput("distribute takes the plain model, ddp.module; for DDP there is laconic.compress(ddp, codec)")
    if hasattr(optimizer, INSTALLED):
        raise BadInput("this optimiser is distributed already")
    setattr(optimizer, INSTALLED, mode.install(model, optimizer, world or current(), codec, **options))
    return model, optimizer


def mode_of(optimizer: torch.optim.Optimizer) -> Agreement:
    """What `distribute` installed on this optimiser: its records, `finish()` and `close()`."""
    agreement: Agreement | None = getattr(optimizer, INSTALLED, None)
    if agreement is None:
        raise BadInput("this optimiser is not distributed: call laconic.distribute(model, optimizer) first")
    return agreement
