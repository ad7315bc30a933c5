"""What the modes share whose workers own their weights: the mean of a vector through any codec, and how it is charged.

Callers: local, once, block_momentum, easgd, gossip, hogwild. Invariant: what `Averager.mean` leaves is the same bits
on every worker. With one worker there is nobody to agree with: every mode is then the plain optimiser.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from laconic.consistency.base import Agreement, FlatWeights, start_alike, trained_parameters
from laconic.errors import BadInput, UnknownName
from laconic.exchange.collectives import all_reduce, broadcast
from laconic.exchange.policy import CodecPlan
from laconic.exchange.state import CompressionState
from laconic.transports.world import World

BUCKET_NBYTES = 4 << 20  # as for gradients: one bucket is encoded while another is on the wire
STATES = ("keep", "average", "forget")


class Averager:
    """The mean over all workers of vectors laid out as the model's trained parameters.

    Exchanges go through the codec with error feedback, as gradients do: biases and small parameters are exact, and what
    a codec left out of one mean is in the next. So what is averaged must be a difference whose means add up.

    Args:
        codec: a spec or a schedule of specs by exchange, not by step.
        options: as for `CompressionState`: algorithm, exempt, feedback, hosts.

    Raises:
        BadInput: codec or options that only gradients have.

    Attributes:
        exact: the codec is "none".
        native_nbytes: what the engine's own all-reduce sent so far, which the transport does not see.
    """

    def __init__(
        self, model: nn.Module, weights: FlatWeights, world: World, codec: CodecPlan = "none", **options: Any
    ) -> None:
        if "momentum" in options:
            raise BadInput("momentum corrects gradients on their way; this mode sends weights")
        self.state = CompressionState(codec, model.named_parameters(), world=world, **options)
        if self.state.schedule.names("factors"):
            raise BadInput("codec 'factors' sends a gradient's factors; this mode sends weights")
        self.exact = str(codec) == "none"
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
    """Workers with weights of their own: what the modes that average weights have in common.

    Args:
        codec, options: as for `Averager`.

    Attributes:
        weights: the trained parameters, as one vector.
        averager: takes means through the codec.
        alone: there is one worker only, and nothing is ever exchanged.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        world: World,
        codec: CodecPlan = "none",
        **options: Any,
    ) -> None:
        self.weights = FlatWeights(trained_parameters(model, optimizer))
        self.averager = Averager(model, self.weights, world, codec, **options)
        self.alone = world.world_size == 1
        self._seconds = self._wait_s = 0.0
        self._collective_nbytes = self._settled_nbytes = 0
        start_alike(model, world)
        super().__init__(model, optimizer, world)

    @contextmanager
    def agreeing(self) -> Iterator[None]:
        """Charge what happens inside to this step, and make sure that the weights are still where they were."""
        check_in_place(self.weights, self.optimizer)
        counters = self.world.transport.counters
        begun, before = time.perf_counter(), counters.total_sent_nbytes
        yield
        self._collective_nbytes += counters.total_sent_nbytes - before
        self._seconds += time.perf_counter() - begun

    def sent_nbytes(self) -> int:
        """What this worker has sent for this mode so far; a mode whose threads send at any time adds theirs."""
        return self._collective_nbytes + self.averager.native_nbytes

    def waited(self, seconds: float) -> None:
        """Of the time charged to this step, so much was waiting for others."""
        self._wait_s += seconds

    def settle(self, staleness: int | None = None) -> None:
        """Keep the record of this step and begin that of the next."""
        self.record(self._seconds, self._wait_s, self._unsettled_nbytes(), staleness)
        self._seconds = self._wait_s = 0.0

    def settle_finish(self) -> None:
        """Add what `finish` cost to the last step's record."""
        if self.records:
            last = self.records[-1]
            self.records[-1] = dataclasses.replace(
                last,
                seconds=last.seconds + self._seconds,
                wait_s=last.wait_s + self._wait_s,
                sent_nbytes=last.sent_nbytes + self._unsettled_nbytes(),
            )
        self._seconds = self._wait_s = 0.0

    def _unsettled_nbytes(self) -> int:
        """What was sent since it was last asked."""
        before, self._settled_nbytes = self._settled_nbytes, self.sent_nbytes()
        return self._settled_nbytes - before

    def average_all(self) -> None:
        """Leave the exact mean of all workers' weights, and of their buffers, in every model."""
        if not self.alone:
            with self.agreeing():
                exact = self.averager if self.averager.exact else Averager(self.model, self.weights, self.world)
                mean = self.weights.values.clone()
                self.waited(exact.mean(mean))
                self.weights.values.copy_(mean)
                if exact is not self.averager:
                    self._collective_nbytes += exact.native_nbytes
                    exact.state.close()
                average_buffers(self.model, self.world)
            self.settle_finish()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "exchange": self.averager.state.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        super().load_state_dict(state)
        self.averager.state.load_state_dict(state["exchange"])

    def close(self) -> None:
        self.averager.state.close()
        super().close()


def check_in_place(weights: FlatWeights, optimizer: torch.optim.Optimizer) -> None:
    """Refuse parameters that no longer lie in `weights`: averaging would pass them by."""
    if any(parameter.data_ptr() != part.data_ptr() for parameter, part in weights.parts()):
        raise BadInput("the model's parameters were replaced after distribute() (model.to, .half, …); do that before")
    count = sum(len(group["params"]) for group in optimizer.param_groups)
    if count != len(weights.parameters):
        text = f"{count - len(weights.parameters)} parameters were added to the optimiser after distribute()"
        raise BadInput(f"{text}; add them before, or the workers would drift apart")


def average_buffers(model: nn.Module, world: World) -> None:
    """Floating buffers (running means of BatchNorm) become their mean over the workers, the others rank 0's."""
    for buffer in model.buffers():
        if buffer.is_floating_point():
            all_reduce(buffer, "mean", algorithm="ring", group=world)
        else:
            broadcast(buffer, root=0, group=world)


def check_state_rule(state: str) -> None:
    """Refuse a rule for the optimiser's state that there is not."""
    if state not in STATES:
        raise UnknownName("rule for the optimiser's state", state, STATES)


def consolidate_state(rule: str, optimizer: torch.optim.Optimizer, weights: FlatWeights, world: World) -> None:
    """After weights were averaged: keep, average or forget what the optimiser remembers of each parameter.

    "average" takes the exact mean of all tensors shaped like their parameter (momentum, Adam's moments), which
    all workers must have; "forget" makes the state that of a first step.
    """
    if rule == "forget":
        for parameter in weights.parameters:
            optimizer.state.pop(parameter, None)
    elif rule == "average":
        kept = [
            held
            for parameter in weights.parameters
            for _, held in sorted(optimizer.state.get(parameter, {}).items())
            if isinstance(held, Tensor) and held.shape == parameter.shape and held.is_floating_point()
        ]
        if kept:
            mean = all_reduce(torch.cat([held.reshape(-1) for held in kept]), "mean", algorithm="ring", group=world)
            for held, part in zip(kept, torch.split(mean, [held.numel() for held in kept]), strict=True):
                held.copy_(part.view_as(held))
