"""A checksum of a result's inputs: settings, data, and the functions that made it.

Callers: memos. A function counts with its code, its defaults, what its closure holds and the data that it reads from
its module; an object with its class and what its method `__fingerprint__` returns, or all its attributes; a model with
its weights. An object that counts its own calls gets a new checksum with each, so that its results are computed again
rather than mistaken for others.
"""

from __future__ import annotations

import functools
import hashlib
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

_PLAIN = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, torch.Size)


def fingerprint(*values: Any) -> str:
    """A checksum that changes with anything that results depend on.

    >>> fingerprint([1, "a"]) == fingerprint([1, "a"]) != fingerprint([1, "b"])
    True
    """
    return _Fingerprint().of(values)


class _Fingerprint:
    """The walk over one value."""

    def __init__(self) -> None:
        self._under_way: set[int] = set()

    def of(self, value: Any) -> str:
        if isinstance(value, _PLAIN):
            return _digest(type(value).__name__, repr(value))
        if id(value) in self._under_way:
            return "above"
        self._under_way.add(id(value))
        try:
            return _digest(type(value).__qualname__, *self._parts(value))
        finally:
            self._under_way.discard(id(value))

    def _parts(self, value: Any) -> Iterator[str | bytes]:
        if isinstance(value, torch.Tensor):
            dense = value.detach().cpu()
            dense = (dense.to_dense() if dense.layout != torch.strided else dense).contiguous().reshape(-1)
            yield from (str(value.dtype), str(tuple(value.shape)), dense.view(torch.uint8).numpy().tobytes())
        elif isinstance(value, np.ndarray):
            yield from (str(value.dtype), str(value.shape), np.ascontiguousarray(value).tobytes())
        elif isinstance(value, Mapping):
            yield from (self.of(item) for pair in value.items() for item in pair)
        elif isinstance(value, list | tuple):
            yield from map(self.of, value)
        elif isinstance(value, set | frozenset):
            yield from sorted(map(self.of, value))
        elif isinstance(value, type | types.ModuleType | types.BuiltinFunctionType):
            yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}"
        elif isinstance(value, functools.partial):
            yield from map(self.of, (value.func, value.args, value.keywords))
        elif isinstance(value, types.MethodType):
            yield from map(self.of, (value.__func__, value.__self__))
        elif isinstance(value, types.FunctionType):
            yield from self._function(value)
        elif isinstance(value, torch.nn.Module):
            yield from map(self.of, (repr(value), value.state_dict()))
        elif hasattr(value, "__fingerprint__"):
            yield self.of(value.__fingerprint__())
        else:
            yield from (self.of(item) for pair in getattr(value, "__dict__", {}).items() for item in pair)

    def _function(self, function: types.FunctionType) -> Iterator[str | bytes]:
        yield f"{function.__module__}.{function.__qualname__}"
        yield from self._code(function.__code__)
        yield from map(self.of, (function.__defaults__, function.__kwdefaults__))
        for cell in function.__closure__ or ():
            try:
                yield self.of(cell.cell_contents)
            except ValueError:  # nothing yet
                yield "empty"
        for name in function.__code__.co_names:
            read = function.__globals__.get(name)
            if isinstance(read, types.FunctionType) and read.__module__ != function.__module__:
                yield f"{read.__module__}.{read.__qualname__}"
            elif not isinstance(read, type | types.ModuleType):
                yield self.of(read)

    def _code(self, code: types.CodeType) -> Iterator[str | bytes]:
        yield from (code.co_code, repr(code.co_names))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self._code(constant)
            else:
                yield repr(sorted(map(repr, constant)) if isinstance(constant, frozenset) else constant)


def _digest(*parts: str | bytes) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else part.encode(errors="backslashreplace")
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.hexdigest()
