"""Agreements whose gradients are averaged in `step()`, through the exchange: all (sync) or a trunk's (treenet)."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from torch import nn

from laconic.consistency.averaging import exchange_of
from laconic.consistency.base import Agreement, Setup
from laconic.consistency.weights import trained_parameters
from laconic.exchange.job import StepRecord
from laconic.exchange.layout import FlatGradients
from laconic.exchange.state import CompressionState

# A message should carry about this much: below, it costs mostly its latency, above, encoding waits for the wire.
MESSAGE_NBYTES = 1 << 20


class ExchangedGradients(Agreement):
    """What such agreements share.

    Attributes:
        state: the exchange's state: records, residuals, codec plan.
        gradients: the flat buffers the gradients lie in.
    """

    def __init__(self, setup: Setup) -> None:
        self.state = exchange_of(setup)
        covers = self.state.parameters.covers
        self.gradients = FlatGradients(self.exchanged(setup), _buffer_nbytes(self.state), covers)
        super().__init__(setup)

    def exchanged(self, setup: Setup) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged."""
        return trained_parameters(setup.model, setup.optimizer)

    def before_step(self) -> None:
        begun, step = time.perf_counter(), self.state.step
        self.gradients.complete()
        self.state.exchange([(buffer.values, list(buffer.parameters)) for buffer in self.gradients.buffers])
        made = [record for record in self.state.records if record.step == step]
        wait_s, sent_nbytes = sum(record.wait_s for record in made), sum(record.sent_nbytes for record in made)
        self.keep(StepRecord(self.step, time.perf_counter() - begun, wait_s, sent_nbytes, staleness=0))

    def explain(self) -> str:
        return self.state.explain()

    def state_dict(self) -> dict[str, Any]:
        return self.state.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.state.load_state_dict(dict(state))
        self.step = self.state.step

    def close(self) -> None:
        self.gradients.close()
        self.state.close()
        super().close()


def _buffer_nbytes(state: CompressionState) -> int:
    """Raw bytes whose payload makes a message of about MESSAGE_NBYTES."""
    if state.auto is not None:
        return 4 * MESSAGE_NBYTES
    first = state.choice.codec_for(0, 0)
    if first.kind == "matrix":
        return 25 << 20
    sample = 1 << 20
    return int(MESSAGE_NBYTES * max(1.0, 4 * sample / first.max_nbytes(sample)))
