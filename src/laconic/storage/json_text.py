"""JSON and lines of JSON from files that may be damaged: a value, or one typed error.

Callers: whoever reads a file of text. Invariant: nothing but PayloadError comes out of a damaged text, be it cut off,
nested without end, not UTF-8, or with numbers that no machine can hold.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from typing import Any

from laconic.errors import PayloadError

MOST_BITS = 996  # of a whole number: as many still fit a float, and no count or random state has more
_MOST_DIGITS = 301  # with the sign


def parse(text: str | bytes) -> Any:
    """The value that a JSON text holds.

    >>> parse(b'{"step": 3}')
    {'step': 3}

    Raises:
        PayloadError: it is no whole JSON; the sentence goes on after "the file is".
    """
    try:
        return json.loads(text.decode() if isinstance(text, bytes) else text, parse_int=_whole)
    except RecursionError:
        raise PayloadError("not whole JSON: it is nested too deeply") from None
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError and _whole's
        raise PayloadError(f"not whole JSON: {error}") from error


def parse_lines(data: bytes) -> Iterator[dict[str, Any]]:
    """The objects of a text of JSON lines, in order; lines that are torn or damaged are left out.

    >>> list(parse_lines(b'{"step": 1}\\n{"st'))
    [{'step': 1}]
    """
    for line in data.splitlines():
        try:
            value = parse(line)
        except PayloadError:
            continue
        if isinstance(value, dict):
            yield value


def read_lines(path: str | os.PathLike[str]) -> Iterator[dict[str, Any]]:
    """The objects of a file of JSON lines, in order; none where there is no file.

    Lines that are torn or damaged are left out: a process that is killed while it appends leaves one.

    Raises:
        PayloadError: the file is there and cannot be read.
    """
    try:
        with open(path, "rb") as file:
            for line in file:
                yield from parse_lines(line)
    except FileNotFoundError:
        return
    except OSError as error:
        raise PayloadError(f"{path} cannot be read: {error.strerror}") from error


def _whole(digits: str) -> int:
    if len(digits) > _MOST_DIGITS:
        raise ValueError(f"a whole number of {len(digits)} digits")
    return int(digits)
