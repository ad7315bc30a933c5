"""The registry of workloads, looked up by spec: a registered name, or a user's own `module:factory`.

Callers: `workloads.get`, the command line, the conformance suite. A workload without parameters is a row of `table.py`;
one that computes something is a function with `@register(name)` in a file of its own.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from laconic import specs
from laconic.errors import BadInput, near
from laconic.registry import Registry, summary_of
from laconic.workloads.workload import Workload

REGISTRY: Registry[Callable[..., Workload]] = Registry("workload")
register = REGISTRY.register
"""Register a function that returns a `Workload` under a name; a decorator, `@register("mine")`.

The function's parameters are those of the spec: `mine(layers=8)` calls it with layers=8. Its docstring's first line is
shown by `laconic workloads`. A workload of your own needs no name: `get("package.module:factory")` takes the function.
"""
names = REGISTRY.names


def declare(summary: str, workload: Workload) -> None:
    """Register a workload that has no parameters under its own name."""

    def declared() -> Workload:
        return workload

    declared.__doc__ = summary
    REGISTRY.add(workload.name, declared)


def summary(name: str) -> str:
    """A workload in one line."""
    return summary_of(REGISTRY.get(name))


def get(spec: str) -> Workload:
    """The workload a spec names: `digits-mlp`, `cifar-resnet(110)`, or one's own, `package.module:factory(8)`.

    >>> get("cifar-resnet(56)").name
    'cifar-resnet(56)'

    Raises:
        UnknownName: no such workload; the valid ones are listed.
        BadInput: arguments it does not take; a module that cannot be imported; a factory that makes no Workload.
    """
    module, colon, own = spec.partition(":")
    workload = _own(spec, module.strip(), own) if colon else specs.build(REGISTRY, spec)
    return replace(workload, name="".join(spec.split()))


def _own(spec: str, module: str, call: str) -> Workload:
    workload = own_factory("workload", spec)()
    if not isinstance(workload, Workload):
        name, _ = specs.split("workload", call)
        made = type(workload).__name__
        raise BadInput(f"workload '{spec}': '{name}' made a {made}, not a laconic.workloads.Workload")
    return workload


def own_factory(what: str, spec: str) -> Callable[[], Any]:
    """A factory of the user's, `module:factory(arguments)`, with its arguments.

    Modules are looked for in the current folder too, as `python -m` does.

    Raises:
        BadInput: the module cannot be imported, or has no such function.
    """
    module, _, call = spec.partition(":")
    module, where = module.strip(), f"{what} '{spec}'"
    name, _ = specs.split(what, call)
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    try:
        found = importlib.import_module(module)
    except Exception as error:  # whatever the user's module raises
        text = f"module '{module}' cannot be imported: {type(error).__name__}: {error}"
        raise BadInput(f"{where}: {text}") from error
    factory = getattr(found, name, None)
    if factory is None:
        functions = [each for each, value in vars(found).items() if callable(value)]
        raise BadInput(f"{where}: module '{module}' has no '{name}'{near(name, functions)}")
    if not callable(factory):
        kind = type(factory).__name__
        raise BadInput(f"{where}: '{name}' is a {kind}, not a function that makes a {what.capitalize()}")
    return partial(specs.call, what, call, factory)
