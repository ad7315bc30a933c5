"""Specs such as `topk(0.01, bucket=512)`: the text that builds a registered frozen dataclass, and back.

Callers: the registries of codecs and of consistency modes. Positional arguments are the dataclass's fields in order;
values are numbers, true, false, none or bare words.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any, Generic, TypeVar

from laconic.errors import BadInput, UnknownName

T = TypeVar("T")
C = TypeVar("C", bound=type)
_PART = re.compile(r"\s*([A-Za-z_][A-Za-z_0-9]*)\s*(?:\((.*)\))?\s*$", re.DOTALL)


class Registry(Generic[T]):
    """Dataclasses by name.

    Args:
        what: what is registered, for messages: "codec".
    """

    def __init__(self, what: str) -> None:
        self.what = what
        self._classes: dict[str, type[T]] = {}

    def register(self, name: str) -> Callable[[C], C]:
        """Class decorator: make a class known under `name`, which becomes its attribute `name`."""

        def add(cls: C) -> C:
            if name in self._classes:
                raise ValueError(f"{self.what} name '{name}' is taken by {self._classes[name].__qualname__}")
            cls.name = name  # type: ignore[attr-defined]
            self._classes[name] = cls
            return cls

        return add

    def names(self) -> list[str]:
        """The registered names, sorted."""
        return sorted(self._classes)

    def get(self, name: str) -> type[T]:
        """The class registered under `name`."""
        if name not in self._classes:
            raise UnknownName(self.what, name, self._classes)
        return self._classes[name]

    def build(self, part: str) -> T:
        """What `name` or `name(arg, key=value)` describes.

        Raises:
            UnknownName: no such name or option; the valid ones are listed.
            BadInput: the spec cannot be read, or the class refuses its values.
        """
        match = _PART.match(part)
        if not match:
            raise BadInput(f"{self.what} spec '{part}' is not of the form name or name(arg, key=value)")
        cls = self.get(match[1])
        fields = [f.name for f in _options(cls)]
        values: dict[str, Any] = {}
        for position, item in enumerate(match[2].split(",") if (match[2] or "").strip() else []):
            if not item.strip():
                raise BadInput(f"{self.what} spec '{part}' has an empty argument")
            key, equals, text = item.partition("=")
            if equals:
                key = key.strip()
            else:
                if position >= len(fields):
                    listed = ", ".join(fields)
                    raise BadInput(f"{self.what} '{match[1]}' takes at most {len(fields)} arguments: {listed}")
                key, text = fields[position], item
            if key not in fields:
                raise UnknownName(f"option of {self.what} '{match[1]}'", key, fields)
            if key in values:
                raise BadInput(f"{self.what} '{match[1]}': option '{key}' is given twice")
            values[key] = _literal(text.strip())
        try:
            return cls(**values)
        except TypeError as error:
            listed = ", ".join(fields) or "none"
            raise BadInput(f"{self.what} '{part}': {error}; its options: {listed}") from error


def spec_of(built: Any) -> str:
    """The spec that builds an equal object: first field bare, the others by name, defaults left out."""
    parts = []
    for position, field in enumerate(_options(built)):
        value = getattr(built, field.name)
        if value == field.default and not (isinstance(value, bool) ^ isinstance(field.default, bool)):
            continue
        text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
        parts.append(text if position == 0 else f"{field.name}={text}")
    return f"{built.name}({', '.join(parts)})" if parts else str(built.name)


def _options(dataclass: Any) -> list[dataclasses.Field[Any]]:
    """The options of a class or instance, in the order of its own file."""
    return [f for f in dataclasses.fields(dataclass) if f.init]


def _literal(text: str) -> int | float | bool | str | None:
    """A number, true/false/none, or a bare word."""
    words: dict[str, bool | None] = {"true": True, "false": False, "none": None}
    if text.lower() in words:
        return words[text.lower()]
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text.strip("'\"")
