"""The training that all doors share: a model of several layers, batches that change in size, evaluations, checkpoints.

Callers: the doors. Batches are a function of seed, rank and step, so that two trainings can be compared bit for bit.
The model has several times as many values as `MESSAGE_NBYTES`, so that several buckets, and sections of the large
layers, are under way at the same time.
"""

from __future__ import annotations

import threading
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from typing import Any, Protocol

import torch
from torch import Tensor, nn

import laconic
from benchmarks.chaos.task import EVERY, Notes, Task
from laconic.errors import LaconicError
from laconic.transports.world import World

MESSAGE_NBYTES = 1024
SIZES = (8, 4, 12)  # of a batch, in turn
_ONE_AT_A_TIME = threading.Lock()  # ranks that are threads share torch's generator
Loss = Callable[[int], Tensor | None]


class Stateful(Protocol):
    """What has a state beside the model's and the optimiser's."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: Any, /) -> object: ...


class Marked(nn.Module):
    """Passes values on, and is a phase: of forward, of backward, or of evaluation."""

    def __init__(self, notes: Notes) -> None:
        super().__init__()
        self.notes = [notes]  # in a list: copies of the model share it

    def forward(self, x: Tensor) -> Tensor:
        (notes,) = self.notes
        notes.at("forward" if self.training else "evaluation")
        if x.requires_grad:
            x.register_hook(self._backward)
        return x

    def _backward(self, gradient: Tensor) -> None:
        self.notes[0].at("backward")

    def __deepcopy__(self, memory: object) -> Marked:
        return Marked(self.notes[0]).train(self.training)


def network(task: Task, notes: Notes) -> nn.Sequential:
    """Three layers that are large enough for codecs, and a last one that is exempt from them: 0, 3, 6 and 9."""
    with _ONE_AT_A_TIME:
        torch.manual_seed(task.seed)
        layers = [nn.Linear(width, size) for width, size in ((32, 64), (64, 64), (64, 64), (64, 10))]
    return nn.Sequential(*(part for layer in layers for part in (layer, Marked(notes), nn.Tanh())))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """The same for all doors."""
    return torch.optim.SGD(model.parameters(), 0.02, momentum=0.5)


def digest(values: Iterable[Tensor]) -> int:
    """A checksum of tensors."""
    return zlib.crc32(b"".join(each.detach().numpy().tobytes() for each in values))


def batch(seed: int, rank: int, step: int) -> tuple[Tensor, Tensor]:
    """This rank's at this step."""
    generator = torch.Generator().manual_seed(1_000_003 * seed + 1009 * step + rank)
    size = SIZES[step % len(SIZES)]
    return torch.randn(size, 32, generator=generator), torch.randint(0, 10, (size,), generator=generator)


def loss(model: nn.Module, seed: int, rank: int, step: int) -> Tensor:
    """Of this rank's batch at this step."""
    x, y = batch(seed, rank, step)
    return nn.functional.cross_entropy(model(x), y)


def train(
    task: Task, world: World, notes: Notes, model: nn.Module, optimizer: torch.optim.Optimizer, make: Loss,
    serves_only: bool = False, kept: Stateful | None = None,
) -> None:  # fmt: skip
    """All steps, from where the checkpoints are; `make` adds a step's gradient, and `kept` is saved with the rest."""
    begin, checkpoints = 0, None
    if task.checkpoints is not None:
        checkpoints = laconic.Checkpoints(task.checkpoints, world=world, keep=3, asynchronous=False)
        found = checkpoints.restore(model=model, optimizer=optimizer)
        begin = 0 if found is None else found.step
        if found is not None and kept is not None:
            kept.load_state_dict(found.extra)
    notes.add(begin=begin)
    for step in range(begin, 0 if serves_only else task.steps):
        notes.begin(step)
        optimizer.zero_grad()
        notes.at("batch")
        make(step)
        optimizer.step()
        notes.add(step=step + 1)
        if (step + 1) % EVERY == 0:
            evaluate(model, task.seed)
            if checkpoints is not None:
                extra = None if kept is None else kept.state_dict()
                save(checkpoints, step + 1, notes, model=model, optimizer=optimizer, extra=extra)
        time.sleep(task.pace_s)
    notes.begin(task.steps)
    notes.add(step=task.steps + 1)  # about to finish


def evaluate(model: nn.Module, seed: int) -> None:
    """On data that all ranks have."""
    model.eval()
    with torch.no_grad():
        model(batch(seed, 99, 0)[0])
    model.train()


def save(checkpoints: Any, step: int, notes: Notes, **parts: Any) -> None:
    """Save, and go on without where that is refused as it should be: by an error of ours, or a warning."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            checkpoints.save(step, **parts)
            notes.add(saved=step, warned=[str(each.message)[:300] for each in told])
        except LaconicError as error:
            notes.add(unsaved=step, text=str(error)[:300])
