"""Trees of values and tensors as JSON can hold them, and back: what a model's or optimiser's state consists of.

Callers: `block.py` for files, `churn/replica.py` for messages. In the JSON a tensor is {"tensor": its number}, a dict
is {"dict": [[key, value], …]} (keys may be numbers), a tuple is {"tuple": […]}.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput

DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
                  torch.int8, torch.uint8, torch.bool)
}  # fmt: skip


def plain(value: Any, tensors: list[Tensor], what: str = "checkpoint") -> Any:
    """`value` as JSON can hold it, its tensors collected in `tensors`.

    Raises:
        BadInput: something else is in it; `what` is what cannot hold it.
    """
    if isinstance(value, Tensor):
        if str(value.dtype).removeprefix("torch.") not in DTYPES:
            raise BadInput(f"a {what} cannot hold a tensor of {value.dtype}")
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if isinstance(value, dict):
        if unfit := [key for key in value if not isinstance(key, str | int)]:
            raise BadInput(f"a {what}'s keys are texts and whole numbers, got {unfit[0]!r}")
        return {"dict": [[key, plain(item, tensors, what)] for key, item in value.items()]}
    if isinstance(value, tuple):
        return {"tuple": [plain(item, tensors, what) for item in value]}
    if isinstance(value, list):
        return [plain(item, tensors, what) for item in value]
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise BadInput(f"a {what} cannot hold a {type(value).__name__}")


def kinds_of(tensors: list[Tensor]) -> list[list[Any]]:
    """What each tensor is: [dtype, shape]."""
    return [[str(t.dtype).removeprefix("torch."), list(t.shape)] for t in tensors]


def rebuilt(value: Any, tensors: list[Tensor]) -> Any:
    """The other way round, from `plain`'s JSON and the tensors.

    Raises:
        ValueError, IndexError: not such a JSON.
    """
    if isinstance(value, list):
        return [rebuilt(item, tensors) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, held),) = value.items()
    if kind == "tensor":
        return tensors[held]
    if kind == "dict":
        return {key: rebuilt(item, tensors) for key, item in held}
    if kind == "tuple":
        return tuple(rebuilt(item, tensors) for item in held)
    raise ValueError(f"'{kind}' is not known")
