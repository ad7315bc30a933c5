"""Check the form of a saved state (keys, shapes, dtypes) before any of it is loaded.

Callers: every `load_state_dict` of a job and of its parts. A state is compared with an example of the right form.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput


def vector(numel: int) -> Tensor:
    """A float32 vector for `check_like` to compare with, which takes no memory."""
    return torch.empty(numel, device="meta")


def check_like(given: Any, like: Any, what: str = "the state") -> None:
    """Refuse a state that differs in form from `like`: the same keys, shapes and dtypes, numbers for numbers.

    Keys that `like` does not have are ignored; None matches anything.

    >>> check_like({"start": torch.zeros(3), "made": 2}, {"start": vector(4), "made": 0})
    Traceback (most recent call last):
    ...
    laconic.errors.BadInput: the state does not fit: 'start' is float32 of shape (3,), not float32 of shape (4,)

    Raises:
        BadInput: the sentence names the first part that differs.
    """
    _compare(given, like, what, ())


def check_named(given: Any, numels: Mapping[str, int] | None, what: str) -> None:
    """Refuse all but float32 vectors by name, as long as `numels` says; without it names and lengths may be any.

    Raises:
        BadInput: the sentence names the first that differs.
    """
    if not isinstance(given, Mapping):
        raise BadInput(f"the state does not fit: '{what}' is {_told(given)}, not vectors by name")
    for name, value in given.items():
        if numels is not None and name not in numels:
            raise BadInput(f"the state is of another model: this one has no parameter '{name}'")
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            raise BadInput(f"the state does not fit: '{what}.{name}' is {_told(value)}, not float32")
        if numels is not None and value.numel() != numels[name]:
            text = f"'{what}.{name}' has {value.numel()} values, '{name}' has {numels[name]}"
            raise BadInput(f"the state does not fit: {text}: another model's?")


def check_optimizer(given: Any, optimizer: torch.optim.Optimizer, what: str) -> None:
    """Refuse the state of an optimiser with other parameter groups.

    Raises:
        BadInput: the sentence names the first part that differs.
    """
    groups = [{"params": group["params"]} for group in optimizer.state_dict()["param_groups"]]
    check_like(given, {"state": {}, "param_groups": groups}, what)
    count = sum(len(group["params"]) for group in groups)
    for number, kept in given["state"].items():
        if number not in range(count) or not isinstance(kept, Mapping):
            raise BadInput(f"{what} does not fit: it has {_told(kept)} of parameter {number!r}, of {count}")


def _compare(given: Any, like: Any, what: str, path: tuple[str, ...]) -> None:
    if isinstance(like, Mapping):
        if not isinstance(given, Mapping):
            raise _misfit(what, path, _told(given), "a dict")
        for key, part in like.items():
            if key not in given:
                raise _misfit(what, (*path, str(key)), "missing", "")
            _compare(given[key], part, what, (*path, str(key)))
    elif isinstance(like, Tensor):
        alike = isinstance(given, Tensor) and (given.dtype, given.shape) == (like.dtype, like.shape)
        if not alike:
            raise _misfit(what, path, _told(given), _told(like))
    elif isinstance(like, list | tuple):
        if not isinstance(given, list | tuple) or len(given) != len(like):
            raise _misfit(what, path, _told(given), _told(like))
        for place, (one, other) in enumerate(zip(given, like, strict=True)):
            _compare(one, other, what, (*path, str(place)))
    elif isinstance(like, int | float):
        fits = isinstance(given, int) or (isinstance(like, float) and isinstance(given, float))
        if not fits or isinstance(given, bool) != isinstance(like, bool):
            raise _misfit(what, path, _told(given), "a whole number" if isinstance(like, int) else "a number")


def _misfit(what: str, path: tuple[str, ...], found: str, wanted: str) -> BadInput:
    place = f"'{'.'.join(path)}'" if path else "it"
    return BadInput(f"{what} does not fit: {place} is {found}{f', not {wanted}' if wanted else ''}")


def _told(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} of shape {tuple(value.shape)}"
    if isinstance(value, list | tuple):
        return f"a list of {len(value)}"
    return f"a {type(value).__name__}"
