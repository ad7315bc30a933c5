"""What the modes share whose workers own their weights: the mean of a vector through any codec, and how it is charged.

Callers: blocks (local, once, block_momentum, natural), easgd, gossip, servers. Invariant: what `Averager.mean` leaves
is the same bits on every worker. With one worker there is nobody to agree with: every mode is then the plain optimiser.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from laconic.consistency.base import Agreement, Setup
from laconic.consistency.weights import (
    FlatWeights,
    average_buffers,
    check_in_place,
    start_alike,
    trained_parameters,
)
from laconic.errors import BadInput
from laconic.exchange.state import CompressionState

BUCKET_NBYTES = 4 << 20  # as for gradients: one bucket is encoded while another is on the wire
# Of the exchange's options, those that weights have too: momentum is of gradients only.
WEIGHT_OPTIONS: tuple[str, ...] = ("algorithm", "exempt", "feedback", "hosts", "message_nbytes")


def exchange_of(setup: Setup) -> CompressionState:
    """The exchange of a mode that is installed on `setup`."""
    options = replace(setup.options, world=setup.world)
    return CompressionState(setup.codec, setup.model.named_parameters(), options)


class Averager:
    """The mean over all workers of vectors laid out as the model's trained parameters.

    Exchanges go through the codec with error feedback, as gradients do: biases and small parameters are exact, and what
    a codec left out of one mean is in the next. So what is averaged must be a difference whose means add up.

    Raises:
        BadInput: a codec that only gradients have.

    Attributes:
        exact: the codec is "none".
        native_nbytes: what the engine's own all-reduce sent so far, which the transport does not see.
    """

    def __init__(self, setup: Setup, weights: FlatWeights) -> None:
        self.state = exchange_of(setup)
        if self.state.choice.names("factors"):
            raise BadInput("codec 'factors' sends a gradient's factors; this mode sends weights")
        self.exact = str(setup.codec) == "none"
        self.native_nbytes = 0
        self._buckets = list(_buckets(weights.parameters))

    def mean(self, values: Tensor) -> float:
        """Replace `values` by its mean over all workers; returns the seconds waited for others."""
        parts = torch.split(values, [numel for numel, _ in self._buckets])
        self.state.exchange([(part, tensors) for part, (_, tensors) in zip(parts, self._buckets, strict=True)])
        records = [record for record in self.state.records if record.step == self.state.step - 1]
        self.native_nbytes += sum(record.sent_nbytes for record in records if record.algorithm == "native")
        return sum(record.wait_s for record in records)


def _buckets(parameters: list[nn.Parameter]) -> Iterator[tuple[int, list[Tensor]]]:
    """Neighbouring parameters, so many that they make BUCKET_NBYTES, and how many values they have."""
    numel, held = 0, list[Tensor]()
    for parameter in parameters:
        numel, held = numel + parameter.numel(), [*held, parameter]
        if 4 * numel >= BUCKET_NBYTES:
            yield numel, held
            numel, held = 0, []
    if held:
        yield numel, held


class OwnWeights(Agreement):
    """Workers with weights of their own.

    Attributes:
        weights: the trained parameters, as one vector.
    """

    def __init__(self, setup: Setup) -> None:
        self.weights = FlatWeights(trained_parameters(setup.model, setup.optimizer))
        start_alike(setup.model, setup.world)
        super().__init__(setup)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Charge what happens inside to this step, and make sure that the weights are still where they were."""
        check_in_place(self.weights, self.optimizer)
        with super().agreeing():
            yield

    def average_all(self) -> None:
        """Leave the exact mean of all workers' weights, and of their buffers, in every model."""
        if not self.alone:
            with self.agreeing():
                self.weights.values.copy_(self.exact_mean(self.weights.values.clone()))
                average_buffers(self.model, self.world)
            self.settle_finish()

    def exact_mean(self, values: Tensor) -> Tensor:
        """The mean of `values` over all workers, in float32 whatever the codec; in place."""
        exact = Averager(Setup(self.model, self.optimizer, self.world), self.weights)
        self.waited(exact.mean(values))
        self._collective_nbytes += exact.native_nbytes
        exact.state.close()
        return values


class Averaging(OwnWeights):
    """Workers that average their weights, or what they make of them, through the exchange.

    Attributes:
        averager: takes means through the codec.
    """

    def __init__(self, setup: Setup, *, feedback: bool | None = None) -> None:
        if feedback is not None and setup.options.feedback is None:
            setup = replace(setup, options=replace(setup.options, feedback=feedback))
        super().__init__(setup)
        self.averager = Averager(setup, self.weights)

    def sent_nbytes(self) -> int:
        return super().sent_nbytes() + self.averager.native_nbytes

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "exchange": self.averager.state.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self.averager.state.load_state_dict(state["exchange"])

    def close(self) -> None:
        self.averager.state.close()
        super().close()
