"""Synchronous training: every step waits for the mean of all workers' gradients, through any codec.

Callers: `distribute(consistency="sync")`. Communication happens in `optimizer.step()`, before the inner step, so that
gradients may be accumulated over several backwards; all workers end every step with the same bits.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import nn

from laconic.consistency.backup import BackupAgreement
from laconic.consistency.base import Agreement, Mode, register, start_alike, trained_parameters
from laconic.errors import BadInput
from laconic.exchange.attached import attach
from laconic.exchange.flat import FlatGradients
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


class SyncAgreement(Agreement):
    """Sync at work.

    Attributes:
        state: the exchange's state: records, residuals, codec schedule.
        gradients: the flat buffers the gradients lie in.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, **options: Any
    ) -> None:
        trained = trained_parameters(model, optimizer)
        self.state = CompressionState(codec, model.named_parameters(), world=world, **options)
        names = {id(parameter): name for name, parameter in model.named_parameters()}
        if self.state.schedule.names("factors"):
            self.state.observe(model)
        self.gradients = FlatGradients(
            trained, self._buffer_nbytes(), lambda p: self.state.exempt.covers(names[id(p)], p)
        )
        attach(model, self.state)
        attach(optimizer, self.state)
        start_alike(model, world)
        super().__init__(model, optimizer, world)

    def _buffer_nbytes(self) -> int:
        """Raw bytes whose payload makes a message of about MESSAGE_NBYTES."""
        if self.state.auto is not None:
            return 4 * MESSAGE_NBYTES
        first = self.state.schedule.at(0)
        if first.kind == "matrix":
            return 25 << 20
        sample = 1 << 20
        return int(MESSAGE_NBYTES * max(1.0, 4 * sample / first.max_nbytes(sample)))

    def before_step(self) -> None:
        if strangers := [p for g in self.optimizer.param_groups for p in g["params"] if not self._knows(p)]:
            text = f"{len(strangers)} parameters with gradients were frozen, or not the optimiser's, at distribute()"
            raise BadInput(f"{text}; unfreeze or add them before it, or the workers would drift apart")
        begun, step = time.perf_counter(), self.state.step
        self.gradients.complete()
        self.state.exchange([(buffer.values, list(buffer.parameters)) for buffer in self.gradients.buffers])
        made = [record for record in self.state.records if record.step == step]
        wait_s, sent_nbytes = sum(record.wait_s for record in made), sum(record.sent_nbytes for record in made)
        self.record(time.perf_counter() - begun, wait_s, sent_nbytes, staleness=0)

    def _knows(self, parameter: torch.Tensor) -> bool:
        return parameter.grad is None or self.gradients.holds(parameter)

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state.load_state_dict(state)
        self.step = self.state.step

    def close(self) -> None:
        """Undo `distribute`: the optimiser steps alone again."""
        self.gradients.close()
        self.state.close()
        super().close()
