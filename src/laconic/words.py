"""Numbers formatted for readers: three digits and a unit, and a dash where nothing is known."""

from __future__ import annotations

import math
import re
from collections.abc import Callable

from laconic.statistics import Median
from laconic.workloads.description import Description

NOTHING = "–"
_SPACE = "\N{NARROW NO-BREAK SPACE}"
_TIMES = [(60.0, "min", 120.0), (1.0, "s", 1.0), (1e-3, "ms", 1e-3), (1e-6, "µs", 0.0)]
_RATES = [(1e12, "Tbit/s"), (1e9, "Gbit/s"), (1e6, "Mbit/s"), (1e3, "kbit/s")]
_SIZES = [(1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (1.0, "B")]


def sentence(line: str) -> str:
    """A line with a capital letter and a full stop."""
    return line[:1].upper() + line[1:] + ("" if line.endswith(".") else ".")


def plain(line: str) -> str:
    """A line for a terminal: with ordinary spaces."""
    return line.replace(_SPACE, " ")


def digits(value: float, count: int = 3) -> str:
    """`value` with `count` significant digits, plainly written where that is short.

    >>> digits(0.0012345), digits(1234.5), digits(16.0)
    ('0.00123', '1,234', '16.0')
    """
    if not math.isfinite(value):
        return str(value)
    if value == 0:
        return "0"
    places = count - 1 - math.floor(math.log10(abs(value)))
    return f"{value:,.{max(places, 0)}f}" if -3 <= places <= 8 else f"{value:.{count - 1}e}"


def count(number: int, thing: str) -> str:
    """A number of things.

    >>> count(1, "worker"), count(2, "worker")
    ('1 worker', '2 workers')
    """
    return f"{number} {thing}{'s' * (number != 1)}"


def seconds(value: float) -> str:
    """Seconds in the unit that fits: µs, ms, s or min.

    >>> seconds(0.01234).replace(_SPACE, " ")
    '12.3 ms'
    """
    if value == 0 or not math.isfinite(value):
        return f"{digits(value)}{_SPACE}s"
    unit, name = _time_unit(value)
    return f"{digits(value / unit)}{_SPACE}{name}"


def seconds_range(low: float, high: float) -> str:
    """Two times in the unit that fits the shorter one.

    >>> seconds_range(75.4, 135.6).replace(_SPACE, " ")
    '75.4 – 136 s'
    """
    unit, name = _time_unit(low) if low else (1.0, "s")
    return f"{digits(low / unit)} – {digits(high / unit)}{_SPACE}{name}"


def _time_unit(value: float) -> tuple[float, str]:
    return next((unit, name) for unit, name, least in _TIMES if abs(value) >= least)


def joules(value: float) -> str:
    """Energy in J, below one in mJ.

    >>> joules(7.48).replace(_SPACE, " "), joules(0.0123).replace(_SPACE, " ")
    ('7.48 J', '12.3 mJ')
    """
    return f"{digits(value)}{_SPACE}J" if value >= 1 else f"{digits(1e3 * value)}{_SPACE}mJ"


def nbytes(value: float) -> str:
    """Bytes in decimal units.

    >>> nbytes(1806396).replace(_SPACE, " ")
    '1.81 MB'
    """
    unit, name = next(((unit, name) for unit, name in _SIZES if abs(value) >= unit), (1.0, "B"))
    number = f"{value:.0f}" if unit == 1 else digits(value / unit)
    return f"{number}{_SPACE}{name}"


def rate(bps: float) -> str:
    """Bits a second in decimal units.

    >>> rate(4.2e7).replace(_SPACE, " ")
    '42.0 Mbit/s'
    """
    unit, name = next((each for each in _RATES if bps >= each[0]), _RATES[-1])
    return f"{digits(bps / unit)}{_SPACE}{name}"


def percent(value: float, places: int = 1) -> str:
    """A share as a percentage."""
    return f"{100 * value:.{places}f}{_SPACE}%"


def times(value: float) -> str:
    """A ratio."""
    return f"{digits(value)}{_SPACE}×"


def goal(workload: Description) -> str:
    """A workload's target as one reads it: 95 %, or 2.2 bits per character."""
    target = workload.target_accuracy
    if target is None:
        return "no target"
    if workload.judged_by_loss:
        return f"{target:g} {workload.target_metric.removeprefix('test ')}"
    return f"{100 * target:.4g}{_SPACE}%"


def p_value(value: float | None) -> str:
    """A p value, never 0."""
    shown = NOTHING if value is None else "p < 0.001" if value < 0.001 else f"p = {value:.2g}"
    return shown.replace(" ", "\N{NO-BREAK SPACE}")


def between(low: float, high: float, unit: Callable[[float], str]) -> str:
    """An interval, its unit written once where both ends have the same.

    >>> between(0.9, 1.2, seconds).replace(_SPACE, " "), between(2, 3, seconds).replace(_SPACE, " ")
    ('900 ms to 1.20 s', '2.00 to 3.00 s')
    """
    first, last = unit(low), unit(high)
    if first == last:
        return first
    number, _, name = first.partition(_SPACE)
    return f"{number if last.endswith(_SPACE + name) else first} to {last}"


def spread(found: Median, unit: Callable[[float], str]) -> str:
    """The interval of a median."""
    return "one seed" if found.count == 1 else between(found.low, found.high, unit)


def coverage(found: Median) -> str:
    """What the intervals by ranks of so many seeds are."""
    if found.count == 1:
        return "there is one seed, so nothing is known of the spread"
    if found.coverage >= 0.95:
        return f"below each, its {percent(0.95, 0)} interval by ranks"
    sure = percent(found.coverage, 0)
    return f"below each, the range of the {found.count} seeds, which holds the true median in {sure} of such runs"


def interval(found: tuple[float, float] | None, unit: Callable[[float], str]) -> str:
    """An interval, where there is one."""
    return "no interval" if found is None else between(*found, unit)


def link(spec: str) -> str:
    """A link's spec as one reads it.

    >>> link("100mbit,40ms").replace("\\N{NO-BREAK SPACE}", " ")
    '100 Mbit/s, 40 ms'
    """
    units = {"kbit": "kbit/s", "mbit": "Mbit/s", "gbit": "Gbit/s", "bit": "bit/s", "us": "µs"}
    shown = re.sub(
        r"([\d.])([a-zµ]+)", lambda m: f"{m[1]}\N{NO-BREAK SPACE}{units.get(m[2], m[2])}", spec, flags=re.IGNORECASE
    )
    return shown.replace(",", ", ")
