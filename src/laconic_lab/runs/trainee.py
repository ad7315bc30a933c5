"""The base of all strategies: a model set up to train by a configuration.

Callers: the trainer, for each step, each checkpoint and the trial's figures; `strategies.py` and `divided.py` hold the
subclasses, one for each kind of configuration.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar, NamedTuple

from torch import nn
from torch.optim import Optimizer

from laconic.codecs import Codec
from laconic.exchange.job import BucketRecord
from laconic.transports.world import World
from laconic.workloads.workload import Batch, Task
from laconic_lab.records.record import Configuration, LayerRecord, NoiseRecord, TimeSpan

KEPT = 512  # exchanges, for a timeline


class Times(NamedTuple):
    """When a step began, when its forward, its backward and its optimiser ended."""

    begun: float
    forward: float
    backward: float
    ended: float


class Parts(NamedTuple):
    """A step's seconds by activity, and its bytes sent, as far as known."""

    compute: float
    encode: float = 0.0
    wait: float = 0.0
    decode: float = 0.0
    sent: float = 0.0


class Trainee(ABC):
    """A model made to train by a configuration: call `model`, then backward, then `optimizer.step()`.

    Attributes:
        model: what is called.
        module: the network itself.
        counts: whether the strategy counts the bytes it sends.
        recent: the last exchanges that `parts` has taken.
    """

    counts: ClassVar[bool] = True

    def __init__(self, chosen: Configuration, module: nn.Module, optimizer: Optimizer, world: World) -> None:
        self.chosen, self.model, self.module, self.optimizer = chosen, module, module, optimizer
        self.recent: deque[BucketRecord] = deque(maxlen=KEPT)

    def part(self, share: int, workers: int) -> tuple[int, int]:
        """Which part of a step's samples this worker is given: its number, and of how many."""
        return share, workers

    def train_on(self, task: Task, batch: Batch) -> tuple[float, float]:
        """Forward and backward; returns when forward ended, and the loss."""
        loss = task.loss(self.model, batch)
        forward = time.perf_counter()
        loss.backward()
        return forward, float(loss.detach())

    @abstractmethod
    def parts(self, times: Times) -> Parts:
        """The parts of the step that has just ended; called once a step."""

    @abstractmethod
    def payload(self, name: str, parameter: nn.Parameter) -> tuple[str, float]:
        """By what codec a parameter's gradient goes, and how many bytes a worker sends for it."""

    def layers(self, sent: float | None) -> list[LayerRecord]:
        """What a worker sends in a step, by parameter or boundary; `sent` is what was counted, where it was."""
        return layers(self.module, self.payload, self.chosen.workers, sent)

    def spans(self) -> list[TimeSpan]:
        """A timeline of the strategy's own, by stage; empty where the exchanges make it."""
        return []

    def exchanged(self) -> list[BucketRecord]:
        """The exchanges of the last step that are on record and were not taken by `parts`; empty where none are."""
        return []

    def waits(self, times: Times) -> list[tuple[float, float]]:
        """From when to when the training waited for exchanges, in a step at least; empty where that is not known."""
        return []

    def layers_of(self, bucket: int) -> list[str]:
        """The names of the parameters in a bucket of gradients."""
        return []

    def staleness(self) -> list[int]:
        """Of the steps so far; empty where it is not measured."""
        return []

    def noise(self) -> NoiseRecord | None:
        """What quality "noise" found, where it chooses."""
        return None

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint must hold beside module and optimiser."""
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:  # noqa: B027 - most keep nothing
        """The reverse of `state_dict`."""

    def settle(self) -> None:  # noqa: B027 - most train the module itself
        """Bring the module up to date; all workers call it before it is tested, saved or compared."""

    def catch_up(self) -> None:  # noqa: B027 - most exchange within the step
        """Finish the exchange under way; all workers call it at the end of an epoch, with the clock running."""

    def finish(self) -> None:  # noqa: B027 - most leave the same model on all workers at every step
        """Leave the trained weights in the module; all workers call it after the last step."""

    def close(self) -> None:  # noqa: B027 - most hold nothing
        """End threads and sockets."""


def wire_factor(world_size: int) -> float:
    """How many times its size a worker sends of a gradient in an all-reduce of the least bytes: 2(P−1)/P."""
    return 2 * (world_size - 1) / world_size


def coded_nbytes(codec: Codec, numel: int) -> float:
    """The bytes of so many values in a long message: its header is shared by all layers."""
    whole = max(1 << 16, numel)
    return codec.max_nbytes(whole) / whole * numel


def layers(
    module: nn.Module, payload: Callable[[str, nn.Parameter], tuple[str, float]], world_size: int, sent: float | None
) -> list[LayerRecord]:
    """What one worker sends of each parameter in a step.

    Buckets mix layers, so what was counted, `sent`, is divided among them by their payloads' sizes; where nothing was,
    the sizes themselves stand.
    """
    if world_size == 1:
        return []
    found = {name: payload(name, parameter) for name, parameter in module.named_parameters()}
    total = sum(nbytes for _, nbytes in found.values())
    scale = 1.0 if sent is None or total == 0 else sent / total
    factor = wire_factor(world_size)
    return [
        LayerRecord(name, list(p.shape), p.numel(), found[name][0], 4.0 * p.numel() * factor, found[name][1] * scale)
        for name, p in module.named_parameters()
    ]
