"""Specs such as `cifar-resnet(110)` or `mlp(64, 10, hidden=256)`: a registered name and its arguments.

Callers: the registries of `models` and `workloads`.
"""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from laconic.errors import BadInput, UnknownName

Built = TypeVar("Built")
_SPEC = re.compile(r"\s*([A-Za-z][\w-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)


def split(spec: str, what: str) -> tuple[str, tuple[Any, ...], dict[str, Any]]:
    """The name, positional and named arguments of a spec; arguments are Python literals.

    >>> split("cifar-resnet(110)", "workload")
    ('cifar-resnet', (110,), {})

    Raises:
        BadInput: the spec is not of the form name or name(literal, key=literal).
    """
    match = _SPEC.fullmatch(spec)
    if match is None:
        raise BadInput(f"{what} '{spec}' is not of the form name or name(argument, key=argument)")
    try:
        call = ast.parse(f"f({match[2] or ''})", mode="eval").body
        if not isinstance(call, ast.Call) or any(word.arg is None for word in call.keywords):
            raise ValueError("not a list of arguments")
        values = tuple(ast.literal_eval(value) for value in call.args)
        return match[1], values, {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
    except (SyntaxError, ValueError) as error:
        raise BadInput(f"{what} '{spec}': its arguments must be numbers, or words in quotes") from error


def build(spec: str, what: str, builders: Mapping[str, Callable[..., Built]]) -> Built:
    """What the builder a spec names returns for the spec's arguments.

    Raises:
        UnknownName: no such name; the valid ones are listed.
        BadInput: arguments it does not take, listed too.
    """
    name, values, options = split(spec, what)
    if name not in builders:
        raise UnknownName(what, name, builders)
    signature = inspect.signature(builders[name])
    try:
        signature.bind(*values, **options)
    except TypeError as error:
        takes = ", ".join(signature.parameters) or "none"
        raise BadInput(f"{what} '{spec}': {error}; its arguments: {takes}") from error
    return builders[name](*values, **options)
