"""Agreements whose gradients are averaged in `step()`, through the exchange: all (sync) or a trunk's (treenet)."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from laconic.consistency.base import Agreement
from laconic.exchange.flat import FlatGradients
from laconic.exchange.policy import CodecPlan
from laconic.exchange.state import CompressionState
from laconic.transports.world import World


class ExchangedGradients(Agreement):
    """What such agreements share.

    Args:
        trained: the parameters whose gradients are averaged.
        buffer_nbytes: how many raw bytes of gradients make a bucket, for this exchange.
        start: lets the workers begin alike, as far as they shall.
        options: as for `CompressionState`: algorithm, exempt, feedback, momentum, hosts.

    Attributes:
        state: the exchange's state: records, residuals, codec schedule.
        gradients: the flat buffers the gradients lie in.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, world: World, codec: CodecPlan, *,
        trained: Sequence[nn.Parameter], buffer_nbytes: Callable[[CompressionState], int], start: Callable[[], None],
        **options: Any,
    ) -> None:  # fmt: skip
        self.state = CompressionState(codec, model.named_parameters(), world=world, **options)
        names, exempt = self.state.names, self.state.exempt
        self.gradients = FlatGradients(
            trained, buffer_nbytes(self.state), lambda p: exempt.covers(names[id(p)], p)
        )
        start()
        super().__init__(model, optimizer, world)

    def before_step(self) -> None:
        begun, step = time.perf_counter(), self.state.step
        self.gradients.complete()
        self.state.exchange([(buffer.values, list(buffer.parameters)) for buffer in self.gradients.buffers])
        made = [record for record in self.state.records if record.step == step]
        wait_s, sent_nbytes = sum(record.wait_s for record in made), sum(record.sent_nbytes for record in made)
        self.record(time.perf_counter() - begun, wait_s, sent_nbytes, staleness=0)

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
