"""The registry of networks: `@network(...)` on a builder registers it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec

from torch import nn

from laconic import specs
from laconic.registry import Registry, summary_of

P = ParamSpec("P")


@dataclass(frozen=True)
class KnownNetwork:
    """A registered network.

    Attributes:
        name: as given to `build`.
        builder: (**arguments) -> nn.Module.
        sample: shape of one input sample; () where it is not a dense tensor.
        vocabulary: inputs are whole numbers below this; 0 where they are float32.
        published: parameters as published for the default arguments, or None where nobody published them.
        summary: first line of the builder's docstring.
    """

    name: str
    builder: Callable[..., nn.Module]
    sample: tuple[int, ...]
    vocabulary: int
    published: int | None
    summary: str


REGISTRY: Registry[KnownNetwork] = Registry("network")


def network(
    name: str, sample: tuple[int, ...] = (), published: int | None = None, vocabulary: int = 0
) -> Callable[[Callable[P, nn.Module]], Callable[P, nn.Module]]:
    """Decorator: register a builder under `name`."""

    def add(builder: Callable[P, nn.Module]) -> Callable[P, nn.Module]:
        REGISTRY.add(name, KnownNetwork(name, builder, sample, vocabulary, published, summary_of(builder)))
        return builder

    return add


names = REGISTRY.names
describe = REGISTRY.get


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
    name, _ = specs.split("network", spec)
    return specs.call("network", spec, describe(name).builder)


def parameter_count(model: nn.Module) -> int:
    """Values trained in a network; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())
