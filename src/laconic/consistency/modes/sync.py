"""Synchronous training: every step waits for the mean of all workers' gradients, through any codec.

Callers: `distribute(consistency="sync")`. Communication happens in `optimizer.step()`, before the inner step, so that
gradients may be accumulated over several backwards; all workers end every step with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.consistency.backup import BackupAgreement
from laconic.consistency.base import Agreement, Mode, register, start_alike, trained_parameters
from laconic.consistency.exchanged import ExchangedGradients
from laconic.errors import BadInput
from laconic.exchange.attached import attach
from laconic.exchange.policy import CodecPlan
from laconic.exchange.state import CompressionState
from laconic.transports.world import World

# A message should carry about this much: below, it costs mostly its latency, above, encoding waits for the wire.
MESSAGE_NBYTES = 1 << 20


@register("sync")
@dataclass(frozen=True)
class Sync(Mode):
    """Every step waits for the mean of all workers' gradients; the weights stay the same bits everywhere.

    Args:
        drop_slowest: how many workers a step does not wait for (`backup.py`); gradients are then sent as they are.
    """

    drop_slowest: int = 0

    summary: ClassVar[str] = "every step waits for the mean of all gradients"
    examples: ClassVar[tuple[str, ...]] = ("sync", "sync(drop_slowest=1)")

    def __post_init__(self) -> None:
        if self.drop_slowest < 0:
            raise BadInput(f"drop_slowest is a number of workers, got {self.drop_slowest}")

    def install(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> Agreement:
        if self.drop_slowest:
            if codec != "none" or options:
                raise BadInput(f"{self} sends gradients as they are: it takes no codec and no further options")
            return BackupAgreement(model, optimizer, world, self.drop_slowest)
        return SyncAgreement(model, optimizer, world, codec, **options)


class SyncAgreement(ExchangedGradients):
    """Sync at work."""

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> None:
        super().__init__(
            model, optimizer, world, codec, trained=trained_parameters(model, optimizer),
            buffer_nbytes=_buffer_nbytes, start=partial(start_alike, model, world), **options,
        )  # fmt: skip
        if self.state.schedule.names("factors"):
            self.state.observe(model)
        attach(model, self.state)
        attach(optimizer, self.state)

    def before_step(self) -> None:
        if strangers := [p for g in self.optimizer.param_groups for p in g["params"] if not self._knows(p)]:
            text = f"{len(strangers)} parameters with gradients were frozen, or not the optimiser's, at distribute()"
            raise BadInput(f"{text}; unfreeze or add them before it, or the workers would drift apart")
        super().before_step()

    def _knows(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is None or self.gradients.holds(parameter)


def _buffer_nbytes(state: CompressionState) -> int:
    """Raw bytes whose payload makes a message of about MESSAGE_NBYTES."""
    if state.auto is not None:
        return 4 * MESSAGE_NBYTES
    first = state.schedule.at(0)
    if first.kind == "matrix":
        return 25 << 20
    sample = 1 << 20
    return int(MESSAGE_NBYTES * max(1.0, 4 * sample / first.max_nbytes(sample)))
