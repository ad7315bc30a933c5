"""Synchronous training: every step waits for the mean of all workers' gradients, through any codec.

Callers: `distribute(consistency="sync")`. Communication happens in `optimizer.step()`, before the inner step, so that
gradients may be accumulated over several backwards; all workers end every step with the same bits.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from laconic.consistency.backup import BackupAgreement
from laconic.consistency.base import EXCHANGE_OPTIONS, Agreement, Mode, Setup, register
from laconic.consistency.exchanged import ExchangedGradients
from laconic.consistency.weights import start_alike
from laconic.errors import BadInput


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
    options: ClassVar[tuple[str, ...]] = EXCHANGE_OPTIONS

    def __post_init__(self) -> None:
        if self.drop_slowest < 0:
            raise BadInput(f"drop_slowest is a number of workers, got {self.drop_slowest}")

    @property
    def no_codec(self) -> str:
        return "it sends gradients as they are" if self.drop_slowest else ""

    def install(self, setup: Setup) -> Agreement:
        if self.drop_slowest:
            setup.options.refuse(str(self))
            return BackupAgreement(setup, self.drop_slowest)
        return SyncAgreement(setup)


class SyncAgreement(ExchangedGradients):
    """Sync at work."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        start_alike(setup.model, setup.world)
        self.state.observe(setup.model)

    def before_step(self) -> None:
        if strangers := [p for g in self.optimizer.param_groups for p in g["params"] if not self._knows(p)]:
            text = f"{len(strangers)} parameters with gradients were frozen, or not the optimiser's, at distribute()"
            raise BadInput(f"{text}; unfreeze or add them before it, or the workers would drift apart")
        super().before_step()

    def _knows(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is None or self.gradients.holds(parameter)
