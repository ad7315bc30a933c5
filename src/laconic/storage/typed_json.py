"""Plain values of JSON as typed objects and back, checked: a wrong value is named by its place, as in `trials[2].seed`.

Callers: whoever keeps a dataclass in a file: records, plans, link profiles, journals, memos. What a field may be is its
annotation, which msgspec reads; what annotations cannot say belongs into `__post_init__`. JSON has no NaN or infinity,
and a training that diverged has both; they are written as the words "nan", "inf" and "-inf" and read back as numbers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any, TypeVar

import msgspec

from laconic.errors import PayloadError

T = TypeVar("T")
_WORDS = {
    "int": "a whole number", "float": "a number", "str": "a text", "bool": "true or false", "object": "an object",
    "array": "a list", "null": "null",
}  # fmt: skip
_NOT_FINITE = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}
_PLACED = re.compile(r"(.*?)(?: - at `(?:key in )?\$(.*)`)?", re.DOTALL)
_STEP = re.compile(r"\.([^.\[]+)|\[(\d+|\.\.\.)\]")
_ABSENT = object()


def to_plain(value: Any) -> Any:
    """`value` as what `json.dumps` takes: dataclasses become objects, tuples lists, NaN and infinities words.

    >>> to_plain([1, math.inf, (True, None)])
    [1, 'inf', [True, None]]
    """
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: to_plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, dict):
        return {str(key): to_plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    return value


def from_plain(kind: type[T], data: Any, where: str, *, whole: bool = False) -> T:
    """What `to_plain` wrote, as a `kind` again: a dataclass, or a list or tuple of such.

    >>> from_plain(tuple[int, float], [1, "inf"], "the pair")
    (1, inf)
    >>> from_plain(list[int], [1, "2"], "the list")
    Traceback (most recent call last):
    ...
    laconic.errors.PayloadError: the list[1]: expected a whole number, got '2'

    Args:
        where: what it is, which begins each message.
        whole: fields with a default must be there, too.

    Raises:
        PayloadError: a field is missing, unknown, of the wrong type or refused; the sentence says which and what came.
    """
    numbers = _numbered(data)
    while True:
        try:
            built = msgspec.convert(numbers, kind)
            break
        except msgspec.ValidationError as error:
            what, path = _PLACED.fullmatch(str(error)).groups(default="")  # type: ignore[union-attr]
            if not _put_back(numbers, data, path):
                raise PayloadError(_sentence(what, path, kind, data, where)) from error
        except UnicodeEncodeError as error:  # msgspec wants to look into a text where none belongs
            raise PayloadError(f"{where} has a text {_shown(error.object)} where something else belongs") from error
    _check_known(data, msgspec.to_builtins(built), where)
    if whole and (missing := [each.name for each in dataclasses.fields(kind) if each.name not in data]):  # type: ignore[arg-type]
        raise PayloadError(f"{where} has no field '{missing[0]}'")
    return built


def _numbered(value: Any) -> Any:
    """A copy with the words for numbers that are not finite as such."""
    if isinstance(value, dict):
        return {key: _numbered(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_numbered(item) for item in value]
    return _NOT_FINITE.get(value, value) if isinstance(value, str) else value


def _put_back(numbers: Any, data: Any, path: str) -> bool:
    """Make a number a word again at a place where a text is expected; False where there was none."""
    *before, last = _steps(path) or [_ABSENT]
    holder = _at(numbers, before)
    if not isinstance(_at(holder, [last]), float) or not isinstance(word := _at(data, [*before, last]), str):
        return False
    holder[last] = word
    return True


def _check_known(data: Any, built: Any, where: str) -> None:
    """Raise PayloadError about a field that was passed over."""
    if isinstance(data, dict):
        for name, item in data.items():
            if name not in built:
                raise PayloadError(f"{where} has a field '{name}' that this version does not know")
            _check_known(item, built[name], f"{where}.{name}")
    elif isinstance(data, list):
        for position, item in enumerate(data):
            _check_known(item, built[position], f"{where}[{position}]")


def _sentence(what: str, path: str, kind: Any, data: Any, where: str) -> str:
    """What msgspec says, in our words, with the value that came."""
    place, found = f"{where}{path}", _at(data, _steps(path))
    if missing := re.fullmatch("Object missing required field `(.*)`", what):
        return f"{place} has no field '{missing[1]}'"
    if length := re.fullmatch(r"Expected `array` of length (\d+), got (\d+)", what):
        return f"{place}: expected {length[1]} values, got {length[2]}"
    expected = re.fullmatch("Expected `([^`]*)`(.*)", what)
    if expected:
        words = " or ".join(_WORDS.get(word, word) for word in expected[1].split(" | "))
        return f"{place}: expected {words}{expected[2] if found is _ABSENT else f', got {_shown(found)}'}"
    if what.startswith("Invalid enum value"):
        return f"{place}: expected one of {', '.join(map(str, _allowed(kind, _steps(path))))}, got {_shown(found)}"
    return f"{place}: {what}"


def _steps(path: str) -> list[Any]:
    return [name or (_ABSENT if number == "..." else int(number)) for name, number in _STEP.findall(path)]


def _at(value: Any, steps: list[Any]) -> Any:
    """What lies at a place; the key of a dictionary is not always known."""
    for step in steps:
        try:
            value = value[step]
        except (LookupError, TypeError):
            return _ABSENT
    return value


def _allowed(kind: Any, steps: list[Any]) -> tuple[Any, ...]:
    """The values that an annotation lists."""
    node: Any = msgspec.inspect.type_info(kind)
    for step in steps:
        if isinstance(step, str):
            node = next(field.type for field in node.fields if field.name == step)
        elif step is _ABSENT:
            node = node.value_type
        else:
            node = node.item_types[step] if hasattr(node, "item_types") else node.item_type
        while hasattr(node, "types"):  # "T | None"
            node = node.types[0]
    return tuple(node.values)


def _shown(data: Any) -> str:
    text = repr(data)
    return text if len(text) <= 40 else text[:37] + "…"
