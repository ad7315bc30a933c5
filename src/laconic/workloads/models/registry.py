"""Which networks there are: `@network(...)` beside a builder is all it takes to be listed, built and counted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from torch import nn

from laconic.errors import UnknownName
from laconic.workloads import spec as specs

P = ParamSpec("P")
_REGISTRY: dict[str, Network] = {}


@dataclass(frozen=True)
class Network:
    """A registered network.

    Attributes:
        name: as given to `build`.
        builder: (**arguments) -> nn.Module.
        sample: shape of one input sample; () where it is not a dense tensor.
        published: parameters as published for the default arguments, or None where nobody published them.
        summary: first line of the builder's docstring.
    """

    name: str
    builder: Callable[..., nn.Module]
    sample: tuple[int, ...]
    published: int | None
    summary: str


def network(
    name: str, sample: tuple[int, ...] = (), published: int | None = None
) -> Callable[[Callable[P, nn.Module]], Callable[P, nn.Module]]:
    """Decorator: register a builder under `name`."""

    def add(builder: Callable[P, nn.Module]) -> Callable[P, nn.Module]:
        if name in _REGISTRY:
            raise ValueError(f"network '{name}' is registered twice")
        summary = (builder.__doc__ or "").strip().splitlines()[0]
        _REGISTRY[name] = Network(name, builder, sample, published, summary)
        return builder

    return add


def names() -> list[str]:
    """The registered networks, sorted."""
    return sorted(_REGISTRY)


def describe(name: str) -> Network:
    """The entry of a network; UnknownName lists the valid ones."""
    if name not in _REGISTRY:
        raise UnknownName("network", name, _REGISTRY)
    return _REGISTRY[name]


def build(spec: str) -> nn.Module:
    """The network a spec names.

    >>> import torch
    >>> with torch.device("meta"):
    ...     parameter_count(build("vgg16"))
    138357544
    >>> parameter_count(build("cifar-resnet(20)"))
    269722

    Raises:
        UnknownName: no such network.
        BadInput: an argument it does not take.
    """
    return specs.build(spec, "network", {name: entry.builder for name, entry in _REGISTRY.items()})


def parameter_count(model: nn.Module) -> int:
    """Values trained in a network; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
