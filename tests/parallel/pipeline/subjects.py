"""Models that are cut in the tests, what one process makes of them, and ranks as threads."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.nn import functional

from laconic.parallel.boundary import Boundary
from laconic.parallel.forms.stages import Stages
from laconic.parallel.pipeline import Pipeline, build
from laconic.transports.threads import run_threads
from laconic.transports.world import World

T = TypeVar("T")


def mlp() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(8)), nn.Linear(12, 5))


class Convolutions(nn.Module):
    """Batch normalisation, layers that work in place, a view, and a weight that no layer calls."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(
            nn.Conv2d(3, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True),
            nn.Conv2d(6, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        )  # fmt: skip
        self.scale = nn.Parameter(torch.ones(16))
        self.spare = nn.Parameter(torch.ones(3))
        self.head = nn.Sequential(nn.Linear(16, 8), nn.ReLU(inplace=True), nn.Linear(8, 5))

    def forward(self, x: Tensor) -> Tensor:
        count = x.shape[0]
        return self.head(self.features(x).reshape(count, 16) * self.scale)


class Skips(nn.Module):
    """A value that every later stage uses, several times."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(12, 12)
        self.layers = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.last = nn.Linear(12, 5)

    def forward(self, x: Tensor) -> Tensor:
        kept = torch.tanh(self.first(x))
        x = kept * 0.3
        for number, layer in enumerate(self.layers):
            x = torch.tanh(layer(x) + kept) * kept + kept / (number + 3)
        return self.last(x + kept)


class Looping(nn.Module):
    """A submodule that torch.fx cannot trace, and an input that only the end uses."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 12)

        def forward(self, x: Tensor) -> Tensor:
            return torch.stack([self.linear(x[row]) for row in range(len(x))])

    def __init__(self) -> None:
        super().__init__()
        self.before = nn.Linear(12, 12)
        self.inner = self.Inner()
        self.after = nn.Linear(12, 5)

    def forward(self, x: Tensor, mask: Tensor, double: bool = False) -> Tensor:
        x = self.after(functional.dropout(self.inner(self.before(x)), 0.0, self.training))
        return x.masked_fill(mask, 0.0) * (2 if double else 1)


def features(count: int = 12) -> tuple[Tensor, ...]:
    return (torch.randn(count, 12, generator=torch.Generator().manual_seed(1)),)


def images(count: int = 12) -> tuple[Tensor, ...]:
    return (torch.randn(count, 3, 4, 4, generator=torch.Generator().manual_seed(1)),)


def masked(count: int = 12) -> tuple[Tensor, ...]:
    return (*features(count), torch.arange(count * 5).view(count, 5) % 7 == 0)


def targets(count: int = 12) -> Tensor:
    return torch.arange(count) % 5


loss_fn = functional.cross_entropy


def one_process(model: nn.Module, inputs: tuple[Tensor, ...], micro: int, loss: Any = loss_fn) -> Tensor:
    """The same micro-batches in the same order; gradients stay in the model."""
    total = torch.zeros(())
    answers = targets(inputs[0].shape[0]).chunk(micro)
    for index, part in enumerate(zip(*(each.chunk(micro) for each in inputs), strict=True)):
        each = loss(model(*part), answers[index]) / micro
        each.backward()
        total = each.detach() if index == 0 else total + each.detach()
    return total


def on_threads(
    stages: int, model: nn.Module, plan: Stages, work: Callable[[Pipeline, World], T], codec: Any = None, **options: Any
) -> list[T]:
    """What `work` gives on each rank for its stage of a copy of the model."""
    copies = [copy.deepcopy(model) for _ in range(stages)]

    def body(transport: Any) -> T:
        world = World(transport)
        return work(build(copies[world.rank], plan, Boundary.of(codec), world, **options), world)

    return run_threads(stages, body, timeout_s=60)


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
