"""Dataclasses to plain JSON values and back, checked: a wrong value is named by its place, as in `trials[2].seed`.

Callers: `record.py`. JSON has no NaN or infinity, and a training that diverged has both; they are written as the
strings "nan", "inf" and "-inf" and read back as numbers.
"""

from __future__ import annotations

import dataclasses
import math
import types
import typing
from typing import Any, TypeVar

from laconic.errors import RecordError

T = TypeVar("T")
_NAMES = {int: "a whole number", float: "a number", str: "a text", bool: "true or false", dict: "an object"}
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def encode(value: Any) -> Any:
    """`value` as what `json.dumps` takes: dataclasses become objects, tuples lists, NaN and infinities strings.

    >>> encode([1, math.inf, (True, None)])
    [1, 'inf', [True, None]]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: encode(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): encode(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def decode(cls: type[T], data: Any, where: str) -> T:
    """An instance of the dataclass `cls` from an object of JSON; fields with a default may be absent.

    Its fields are numbers, texts, booleans, dicts, dataclasses, lists and tuples of those. `where` begins each message.

    Raises:
        RecordError: a field is missing, unknown or of the wrong type; the sentence says which and what came.
    """
    if not isinstance(data, dict):
        raise RecordError(f"{where}: expected an object, got {_shown(data)}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            raise RecordError(f"{where} has a field '{name}' that this version does not know")
    values = {}
    for name, field in fields.items():
        if name in data:
            values[name] = _value(hints[name], data[name], f"{where}.{name}")
        elif field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING:
            raise RecordError(f"{where} has no field '{name}'")
    return cls(**values)


def _value(kind: Any, data: Any, where: str) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType or origin is typing.Union:  # only "T | None" is used
        return None if data is None else _value(arguments[0], data, where)
    if origin is typing.Literal:
        if data not in arguments:
            raise RecordError(f"{where}: expected one of {', '.join(arguments)}, got {_shown(data)}")
        return data
    if origin is list:
        return [_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(_sequence(data, where))]
    if origin is tuple:
        items = _sequence(data, where)
        if len(items) != len(arguments):
            raise RecordError(f"{where}: expected {len(arguments)} values, got {len(items)}")
        return tuple(_value(arguments[i], item, f"{where}[{i}]") for i, item in enumerate(items))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return decode(kind, data, where)
    return _plain(dict if origin is dict else kind, data, where)


def _plain(kind: type, data: Any, where: str) -> Any:
    if kind is float and isinstance(data, str) and data in _NOT_FINITE:
        return _NOT_FINITE[data]
    if kind is float and isinstance(data, int) and not isinstance(data, bool):
        return float(data)
    if not isinstance(data, kind) or (kind is int and isinstance(data, bool)):
        raise RecordError(f"{where}: expected {_NAMES[kind]}, got {_shown(data)}")
    return data


def _sequence(data: Any, where: str) -> list[Any]:
    if not isinstance(data, list):
        raise RecordError(f"{where}: expected a list, got {_shown(data)}")
    return data


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 40 else text[:37] + "…"
