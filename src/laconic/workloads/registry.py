"""Which workloads there are: `@register(name)` beside a function is all it takes to be listed, run and tested."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import ParamSpec

from laconic.workloads import spec as specs
from laconic.workloads.workload import Workload

P = ParamSpec("P")
_REGISTRY: dict[str, Callable[..., Workload]] = {}


def register(name: str) -> Callable[[Callable[P, Workload]], Callable[P, Workload]]:
    """Decorator: make a function that returns a Workload known under `name`."""

    def add(builder: Callable[P, Workload]) -> Callable[P, Workload]:
        if name in _REGISTRY:
            raise ValueError(f"workload '{name}' is registered twice")
        _REGISTRY[name] = builder
        return builder

    return add


def names() -> list[str]:
    """The registered workloads, sorted."""
    return sorted(_REGISTRY)


def summary(name: str) -> str:
    """The first line of what a workload's file says of it."""
    return (_REGISTRY[name].__doc__ or "").strip().splitlines()[0]


def get(spec: str) -> Workload:
    """The workload a spec names: `digits-mlp`, `cifar-resnet(110)`.

    >>> get("cifar-resnet(56)").name
    'cifar-resnet(56)'

    Raises:
        UnknownName: no such workload; the valid ones are listed.
        BadInput: arguments it does not take.
    """
    workload = specs.build(spec, "workload", _REGISTRY)
    return replace(workload, name="".join(spec.split()))
