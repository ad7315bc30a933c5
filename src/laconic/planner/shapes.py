"""Runs torch's operators on shapes alone, with the few values that follow from shapes.

Callers: `trace.py`, `cost.py`. Tensors on the "meta" device have no values, so a model that looks at one, as masks of
attention do (`if mask.all():`), cannot go on there. But positions and masks are made from numbers, not from weights:
small results of operators on known values are computed beside the shapes. Values that depend on a weight stay unknown;
a model that branches on one is refused with an error that names the line.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.weak import WeakTensorKeyDictionary

from laconic.planner.counting import QUANTIZED

MOST_KNOWN = 1 << 20  # values of a tensor that is computed beside its shape
_NEEDS_VALUES = {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape}
META = torch.device("meta")


class NeedsValues(Exception):
    """A model cannot be followed on shapes alone; the text says which operator, and where it was called."""


def _quantized_linear(x: Tensor, packed: Any, *options: Any) -> Tensor:
    return x.new_empty((*x.shape[:-1], packed.unpack()[0].shape[0]))


def _grouped_product(a: Tensor, b: Tensor, offsets: Tensor | None = None, *options: Any) -> Tensor:
    groups = () if offsets is None or a.dim() != b.dim() else (offsets.numel(),)
    groups = (a.shape[0],) if a.dim() == b.dim() == 3 else groups
    return a.new_empty((*groups, a.shape[-2], b.shape[-1]))


def _sparse_product(*args: Any) -> Tensor:
    """A sparse matrix, which is kept for the number of its values, by a dense one."""
    place = next(place for place, each in enumerate(args) if each.layout != torch.strided)
    a, b = args[place : place + 2]
    return cast(Tensor, b.new_empty((a.shape[0], b.shape[1])))


# Operators that torch has no kernel for on shapes, or one for some types alone.
_SHAPES: dict[str, Callable[..., Tensor]] = {
    "aten::_grouped_mm": _grouped_product,
    **{f"quantized::{name}": _quantized_linear for name in QUANTIZED},
}
_SPARSE = ("aten::_sparse_addmm", "aten::_sparse_mm", "aten::addmm", "aten::mm")


class Shapes(TorchDispatchMode):
    """Runs operators on "meta" tensors, and remembers the values of those that follow from numbers."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._values = WeakTensorKeyDictionary()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, given)) if isinstance(leaf, Tensor)]
        if not any(each.is_meta for each in tensors) and torch.device(given.get("device") or "cpu") != META:
            return func(*args, **given)
        if not self._follows(func, tensors):
            self._forget(func, args)
            return _unvalued(func, args, given)
        if _NEEDS_VALUES.isdisjoint(func.tags):
            made = _unvalued(func, args, given)
            if any(each.numel() > MOST_KNOWN for each in _tensors(made)):
                self._forget(func, args)
                return made
            values = self._computed(func, args, given)
        else:
            values = self._computed(func, args, given)
            made = tree_map(lambda leaf: leaf.to("meta") if isinstance(leaf, Tensor) else leaf, values)
        for meta, value in zip(_tensors(made), _tensors(values), strict=True):
            self._values[meta] = value
        return made

    def _follows(self, func: Any, tensors: list[Tensor]) -> bool:
        """Whether the result follows from numbers: it is not by chance, and all that is read is known."""
        name = func._schema.name
        if torch.Tag.nondeterministic_seeded in func.tags or "empty" in name or name in _SHAPES:
            return False
        return all(each in self._values if each.is_meta else each.numel() <= MOST_KNOWN for each in tensors)

    def _computed(self, func: Any, args: Any, given: dict[str, Any]) -> Any:
        def value(leaf: Any) -> Any:
            if isinstance(leaf, Tensor) and leaf.is_meta:
                return self._values[leaf]
            return torch.device("cpu") if isinstance(leaf, torch.device) and leaf == META else leaf

        with torch.no_grad():
            return func(*tree_map(value, args), **tree_map(value, given))

    def _forget(self, func: Any, args: Any) -> None:
        """Forget values that are overwritten with unknown ones, in all views."""
        if not func._schema.is_mutable or not args or not isinstance(args[0], Tensor) or not args[0].is_meta:
            return
        storage = args[0].untyped_storage()._cdata
        for each in [key for key in self._values if key.untyped_storage()._cdata == storage]:
            del self._values[each]


def _tensors(tree: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(tree) if isinstance(leaf, Tensor)]


def _unvalued(func: Any, args: Any, given: dict[str, Any]) -> Any:
    name = func._schema.name
    if name in _SHAPES:
        return _SHAPES[name](*args, *given.values())
    if name in _SPARSE and any(each.layout != torch.strided for each in _tensors(args)):
        return _sparse_product(*args)
    try:
        return func(*args, **given)
    except NotImplementedError as error:
        raise NeedsValues(f"the operator {name} has no kernel for shapes{_place()}") from error
    except RuntimeError as error:
        if _NEEDS_VALUES.isdisjoint(func.tags):
            raise
        raise NeedsValues(f"it goes by a value that depends on weights ({name}){_place()}") from error


def _place() -> str:
    """The line of the model that called the operator."""
    ours = ("/torch/", "/laconic/planner/")
    frames = [each for each in traceback.extract_stack() if not any(part in each.filename for part in ours)]
    last = frames[-1] if frames else None
    return "" if last is None else f" at {last.filename}:{last.lineno}: {last.line}"
