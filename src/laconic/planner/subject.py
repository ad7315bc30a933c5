"""The model to cost or plan: a registered network or workload, the user's `module:factory`, or an nn.Module.

Callers: `cost`, `profile`, `plan`. A subject knows how to build the model, with memory or without, and what it reads.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from laconic import specs
from laconic.errors import BadInput, UnknownName
from laconic.workloads import get, models, names
from laconic.workloads.optimizers import adam, momentum, plain, rmsprop
from laconic.workloads.registry import own_factory
from laconic.workloads.workload import Workload

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam, "momentum": momentum, "rmsprop": rmsprop, "sgd": plain,
}  # fmt: skip
DTYPES = {"float32": torch.float32, "float64": torch.float64, "int64": torch.int64}
NETWORK_BATCH = 1


@dataclass(frozen=True)
class Subject:
    """A model and what it reads.

    Attributes:
        name: as the user named it.
        build: makes the model on the device that is current.
        sample: shape of one input.
        dtype: of the input: whole numbers for embeddings.
        batch: samples a step, by default.
        optimizer: (parameters) -> optimiser.
        workload: the workload it is from, if any: what `--run` trains.
    """

    name: str
    build: Callable[[], nn.Module]
    sample: tuple[int, ...]
    dtype: torch.dtype
    batch: int
    optimizer: Callable[[Iterable[Tensor]], torch.optim.Optimizer]
    workload: Workload | None = None

    def model(self, device: str) -> nn.Module:
        """The model on `device`: "meta", without memory, or "cpu"."""
        with torch.random.fork_rng(devices=[]), torch.device(device):
            return self.build()

    def inputs(self, batch: int, device: str) -> Tensor:
        """Zeros of the right shape."""
        return torch.zeros((batch, *self.sample), dtype=self.dtype, device=device)


def subject(
    model: str | nn.Module, sample: Sequence[int] | None = None, dtype: str | None = None, optimizer: str | None = None
) -> Subject:
    """The subject that a name or a module stands for.

    Args:
        model: a network or workload by name, `module:factory`, or an nn.Module.
        sample: shape of one input, without the batch; None is what the network declares.
        dtype: "float32", "float64" or "int64"; None is what the network declares.
        optimizer: one of OPTIMIZERS; None is the workload's, else momentum.

    Raises:
        UnknownName, BadInput: there is no such model, or its input is not known.
    """
    found = _of_module(model) if isinstance(model, nn.Module) else _named(model)
    if sample is not None:
        found = replace(found, sample=tuple(sample))
    if dtype is not None:
        if dtype not in DTYPES:
            raise UnknownName("input type", dtype, DTYPES)
        found = replace(found, dtype=DTYPES[dtype])
    if optimizer is not None:
        if optimizer not in OPTIMIZERS:
            raise UnknownName("optimiser", optimizer, OPTIMIZERS)
        found = replace(found, optimizer=partial(OPTIMIZERS[optimizer], lr=0.1))
    if not found.sample or min(found.sample) < 1:
        cure = "give the shape of one input: --input-shape 3,224,224"
        raise BadInput(f"'{found.name}' does not say what it reads; {cure}")
    return found


def _named(spec: str) -> Subject:
    _, colon, _ = spec.partition(":")
    if colon:
        return _own(spec)
    name, _ = specs.split("model", spec)
    if name in models.names():
        network = models.describe(name)
        dtype = torch.int64 if network.vocabulary else torch.float32
        return Subject(spec, partial(models.build, spec), network.sample, dtype, NETWORK_BATCH,
                       partial(momentum, lr=0.1))  # fmt: skip
    if name in names():
        return _of_workload(get(spec))
    raise UnknownName("model", name, {*models.names(), *names()})


def _own(spec: str) -> Subject:
    """Of a factory, which is called on "meta" so that weights take no memory; for real where it needs their values."""
    build = own_factory("model", spec)
    try:
        with torch.device("meta"):
            made = build()
        needs_values = False
    except Exception:  # it reads weights from a file, or looks at them
        made, needs_values = build(), True
    if isinstance(made, Workload):
        return _of_workload(replace(build(), name="".join(spec.split())))
    if not isinstance(made, nn.Module):
        raise BadInput(f"model '{spec}': the factory made a {type(made).__name__}, not an nn.Module or a Workload")
    found = replace(_of_module(made), name=spec)
    return found if needs_values else replace(found, build=build)


def _of_workload(workload: Workload) -> Subject:
    data = workload.load().train
    x: Any = workload.inputs(data.x[torch.arange(1)])
    if not isinstance(x, Tensor):
        raise BadInput(f"'{workload.name}' reads sparse rows, which have no shape; choose another workload")
    return Subject(workload.name, partial(models.build, workload.model), tuple(x.shape[1:]), x.dtype, workload.batch,
                   partial(workload.optimizer, lr=workload.learning_rate), workload)  # type: ignore[call-arg]  # fmt: skip


def _of_module(model: nn.Module) -> Subject:
    """A copy on the current device; without memory, tensors are replaced and what is shared stays shared."""

    def build() -> nn.Module:
        if torch.get_default_device().type == "cpu":
            return copy.deepcopy(model)
        memo: dict[int, Any] = {
            id(p): nn.Parameter(torch.empty_like(p, device="meta"), p.requires_grad) for p in model.parameters()
        }
        memo |= {id(b): b.to("meta") for b in model.buffers() if b.layout == torch.strided}  # sparse: as many values
        return copy.deepcopy(model, memo)

    takes_numbers = isinstance(next((m for m in model.modules() if not list(m.children())), model), nn.Embedding)
    dtype = torch.int64 if takes_numbers else torch.float32
    return Subject(type(model).__name__, build, (), dtype, NETWORK_BATCH, partial(momentum, lr=0.1))


def parse_shape(text: str) -> tuple[int, ...]:
    """`3,224,224` as numbers.

    >>> parse_shape("3,32,32")
    (3, 32, 32)
    """
    try:
        shape = tuple(int(part) for part in text.split(","))
    except ValueError:
        shape = ()
    if not shape or min(shape) < 1 or math.prod(shape) > 10**12:
        raise BadInput(f"an input shape is whole numbers with commas, such as 3,224,224; got '{text}'")
    return shape
