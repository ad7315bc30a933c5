"""JSON and lines of JSON from files that may be damaged: a value, or one typed error.

Callers: whoever reads a file of text. Invariants: nothing but PayloadError comes out of a damaged text, be it cut off,
nested without end, not UTF-8, or with numbers that no machine can hold; and a sealed text gives what was sealed, or
PayloadError.

A seal is a checksum of an object's content in the object itself, under the key "seal": SHA-256 of the rest as JSON with
sorted keys and without spaces, its first 16 hexadecimal digits. So spaces and the order of keys may change.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from laconic.errors import PayloadError

MOST_BITS = 996  # of a whole number: as many still fit a float, and no count or random state has more
_MOST_DIGITS = 301  # with the sign
MOST_DEPTH = 200  # of objects and lists in each other: far below where Python's own recursion ends
SEAL = "seal"


def parse(text: str | bytes) -> Any:
    """The value that a JSON text holds.

    >>> parse(b'{"step": 3}')
    {'step': 3}

    Raises:
        PayloadError: it is no whole JSON; the sentence goes on after "the file is".
    """
    try:
        value = json.loads(text.decode() if isinstance(text, bytes) else text, parse_int=_whole)
    except RecursionError:
        raise PayloadError("not whole JSON: it is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError and _whole's
        raise PayloadError(f"not whole JSON: {error}") from error
    if is_too_deep(value):
        raise PayloadError("not whole JSON: it is nested too deeply")
    return value


def is_too_deep(value: Any) -> bool:
    """Whether more than MOST_DEPTH objects and lists are in each other."""
    layer = [value]
    for _ in range(MOST_DEPTH + 1):
        layer = [item for each in layer if isinstance(each, dict | list | tuple)
                 for item in (each.values() if isinstance(each, dict) else each)]  # fmt: skip
        if not layer:
            return False
    return True


def seal(value: Mapping[str, Any], indent: int | None = None) -> str:
    """An object as sealed JSON, which `unseal` reads back.

    >>> seal({"step": 3})
    '{"step": 3, "seal": "f2c76473acac2fa2"}'
    """
    read = json.loads(json.dumps(value))  # as `unseal` will find it: keys are text, tuples are lists
    text = json.dumps({**read, SEAL: _digest(read)}, indent=indent, ensure_ascii=False)
    return text.encode(errors="backslashreplace").decode()  # half a character, as in some file names


def unseal(text: str | bytes, *, required: bool = True) -> dict[str, Any]:
    """The object that was sealed.

    Args:
        required: False reads an object without a seal as it is: people may write or edit such a file by hand.

    >>> unseal(seal({"step": 3}).replace("3", "4", 1))
    Traceback (most recent call last):
    ...
    laconic.errors.PayloadError: changed since it was written: its seal does not fit

    Raises:
        PayloadError: it is no whole JSON, no object, or has changed since; the sentence goes on after "the file is".
    """
    value = parse(text)
    if not isinstance(value, dict):
        raise PayloadError("not an object of JSON")
    found = value.pop(SEAL, None)
    if found is None and not required:
        return value
    if found != _digest(value):
        cure = "" if required else f'; take out the line of "{SEAL}" if somebody changed it on purpose'
        raise PayloadError(f"changed since it was written: its seal does not fit{cure}")
    return value


def parse_lines(data: bytes, read: Callable[[bytes], Any] = parse) -> Iterator[dict[str, Any]]:
    """The objects of a text of JSON lines, in order; lines that are torn or damaged are left out.

    Args:
        read: `parse`, or `unseal` for lines that are sealed.

    >>> list(parse_lines(b'{"step": 1}\\n{"st'))
    [{'step': 1}]
    """
    for line in data.splitlines():
        try:
            value = read(line)
        except PayloadError:
            continue
        if isinstance(value, dict):
            yield value


def read_lines(path: str | os.PathLike[str], read: Callable[[bytes], Any] = parse) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, in order; none where there is no file.

    Lines that are torn or damaged are left out: a process that is killed while it appends leaves one. `read` is as for
    `parse_lines`.

    Raises:
        PayloadError: the file is there and cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for line in file:
                yield from parse_lines(line, read)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PayloadError(f"{path} cannot be read: {error.strerror}") from error


def _digest(value: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)
