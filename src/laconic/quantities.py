"""Numbers with units as users type them: `64MiB`, `10gbit`, `5us`.

Callers: links, the tuner's workspace, the planner's memory, commands that take a size.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from laconic.errors import BadInput

_SIZE_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}
_QUANTITY = re.compile(r"\s*([0-9]*\.?[0-9]+(?:e[+-]?[0-9]+)?)\s*([a-zµ%]*)\s*", re.IGNORECASE)


def parse_nbytes(text: str | int, what: str = "size") -> int:
    """Read a size such as `4096`, `100MB` or `64KiB` in bytes.

    >>> parse_nbytes("100MB")
    100000000
    """
    return int(parse_quantity(str(text), _SIZE_UNITS, f"{what} '{text}'"))


def parse_quantity(text: str, units: Mapping[str, float], what: str) -> float:
    """A number, not negative, times its unit; `what` begins the sentence about one that cannot be read."""
    match = _QUANTITY.fullmatch(text)
    if not match or match[2].lower() not in units:
        names = ", ".join(unit for unit in units if unit)
        raise BadInput(f"{what} should be a number, not negative, with one of the units {names}")
    value = float(match[1]) * units[match[2].lower()]
    if value == float("inf"):
        raise BadInput(f"{what} is too large")
    return value
