"""Specs such as `topk(0.01, bucket=512)` or `mlp((64, 10), dropout=())`: the text that builds a registered thing.

Callers: codecs, modes, workloads and networks; there is no other grammar.

    spec       name | name(argument, …)       a name is letters, digits, _ and -
    argument   value | key=value              a value without a key is the next parameter's
    value      a number | true | false | none | a bare word | 'text' | (value, …) | [value, …]

What builds is a dataclass or a function; its parameters are the valid keys.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import inspect
import re
import typing
from collections.abc import Callable, Collection, Mapping
from typing import Any, TypeVar

from laconic.errors import BadInput, UnknownName
from laconic.registry import Registry

T = TypeVar("T")
_SPEC = re.compile(r"\s*([A-Za-z_][\w-]*)\s*(?:\((.*)\))?\s*", re.DOTALL)
_PIECE = re.compile(r"'[^']*'|\"[^\"]*\"|[()\[\],]|[^()\[\],'\"]+|.")  # quoted text, a bracket, a comma, anything else
_WORDS: dict[str, bool | None] = {"true": True, "false": False, "none": None}
_KINDS: dict[Any, tuple[Any, Any, str]] = {  # by annotation: what is taken, what of it is refused, in words
    int: (int, bool, "a whole number"),
    float: (int | float, bool, "a number"),
    str: (str, (), "a word"),
    bool: (bool, (), "True or False"),
}
_KINDS |= {kind | None: (taken | None, refused, f"{words} or None") for kind, (taken, refused, words) in _KINDS.items()}


def build(registry: Registry[type[T]] | Registry[Callable[..., T]], spec: str) -> T:
    """What the entry that a spec names makes of the spec's arguments.

    Raises:
        UnknownName: no such name or option; the valid ones are listed.
        BadInput: the spec cannot be read, or the entry refuses its values.
    """
    name, _ = split(registry.what, spec)
    return call(registry.what, spec, registry.get(name))


def call(what: str, spec: str, builder: Callable[..., T]) -> T:
    """What `builder` returns for the arguments of a spec, whatever its name.

    Args:
        what: what is built, for messages: "codec".

    Raises:
        UnknownName: no such option; the valid ones are listed.
        BadInput: the spec cannot be read, or the builder refuses its values.
    """
    name, arguments = split(what, spec)
    parameters = list(inspect.signature(builder).parameters)
    listed = ", ".join(parameters) or "none"
    values: dict[str, Any] = {}
    for position, (key, value) in enumerate(arguments):
        if key is None and position >= len(parameters):
            raise BadInput(f"{what} '{name}' takes at most {len(parameters)} arguments: {listed}")
        key = parameters[position] if key is None else key
        if key not in parameters:
            raise UnknownName(f"option of {what} '{name}'", key, parameters)
        if key in values:
            raise BadInput(f"{what} '{name}': option '{key}' is given twice")
        values[key] = value
    try:
        if isinstance(builder, type):  # a class checks its own values, and its TypeErrors are about them
            built: T = builder(**values)
            return built
        inspect.signature(builder).bind(**values)
    except TypeError as error:
        check_kinds(f"{what} '{spec}'", builder, values)
        raise BadInput(f"{what} '{spec}': {error}; its options: {listed}") from error
    check_kinds(f"{what} '{spec}'", builder, values)
    return builder(**values)


def split(what: str, spec: str) -> tuple[str, list[tuple[str | None, Any]]]:
    """The name in a spec, and its arguments as (key or None, value).

    >>> split("network", "mlp((64, 10), dropout=())")
    ('mlp', [(None, (64, 10)), ('dropout', ())])

    Raises:
        BadInput: it is no spec.
    """
    match = _SPEC.fullmatch(spec)
    if not match:
        raise BadInput(f"{what} spec '{spec}' is not of the form name or name(arg, key=value)")
    arguments: list[tuple[str | None, Any]] = []
    for item in pieces(match[2]) if (match[2] or "").strip() else ():
        if not item.strip():
            raise BadInput(f"{what} spec '{spec}' has an empty argument")
        key, equals, text = item.partition("=") if item.strip()[0] not in "'\"([" else ("", "", item)
        try:
            arguments.append((key.strip(), _value(text.strip())) if equals else (None, _value(item.strip())))
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            raise BadInput(f"{what} spec '{spec}': the argument '{item.strip()}' cannot be read") from None
    return match[1], arguments


def check_kinds(what: str, annotated: Callable[..., Any], values: Mapping[str, Any]) -> None:
    """Refuse a value where an annotation asks for an int, float, str or bool and it is none; NaN is not a number.

    Callers: `call`, and dataclasses that users make themselves, before they compare what they were given.

    Args:
        what: what begins the sentence.
        annotated: a function or a dataclass; its other annotations are not looked at.

    >>> def train(epochs: int) -> None: ...
    >>> check_kinds("train", train, {"epochs": "4"})
    Traceback (most recent call last):
    ...
    laconic.errors.BadInput: train: epochs is a whole number, got '4'
    """
    hints = _hints(annotated)
    for key, value in values.items():
        wanted = _KINDS.get(hints.get(key))
        if wanted and (not isinstance(value, wanted[0]) or isinstance(value, wanted[1]) or value != value):
            raise BadInput(f"{what}: {key} is {wanted[2]}, got {value!r}")


@functools.cache
def _hints(annotated: Callable[..., Any]) -> dict[str, Any]:
    try:
        return typing.get_type_hints(annotated)
    except NameError:  # a user's function, with names that only type checkers import
        return {}


def spec_of(built: Any, shown: Collection[str] = ()) -> str:
    """The spec that builds an equal dataclass: first field bare, the others by name, defaults left out.

    Args:
        shown: fields that are not left out.
    """
    parts = []
    made = sorted((f for f in dataclasses.fields(built) if f.init), key=lambda f: bool(f.kw_only))
    for position, field in enumerate(made):
        value = getattr(built, field.name)
        is_default = value == field.default and not (isinstance(value, bool) ^ isinstance(field.default, bool))
        if is_default and field.name not in shown:
            continue
        text = str(value).lower() if value is None or isinstance(value, bool) else str(value)
        parts.append(text if position == 0 and not field.kw_only else f"{field.name}={text}")
    return f"{built.name}({', '.join(parts)})" if parts else str(built.name)


def pieces(arguments: str) -> list[str]:
    """The arguments between the commas that stand outside brackets and quotes.

    >>> pieces("ddp, divide:none@stages(micro=8, cuts=('3', '5'))")
    ['ddp', " divide:none@stages(micro=8, cuts=('3', '5'))"]
    """
    items, depth = [""], 0
    for piece in _PIECE.findall(arguments):
        depth += (piece in "([") - (piece in ")]")
        if piece == "," and depth == 0:
            items.append("")
        else:
            items[-1] += piece
    return items


def _value(text: str) -> Any:
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if text[:1] in ("'", '"', "(", "["):
        return ast.literal_eval(text)
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    if re.search(r"[\s()\[\]{}*'\"=]", text) or not text:
        raise ValueError
    return text
