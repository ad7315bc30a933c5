"""Numbered flags on a chart's x axis: what happened when. Flags that would cover each other become one.

Callers: `charts.py`. Every event keeps its own dotted line; a flag that stands for several says "3–7". The numbers are
those of the list below the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from laconic.lab.report import words
from laconic.lab.report.style import SERIES

HEIGHT = 18  # of a flag, with its tip
_LETTER, _GAP = 6.6, 2.0  # a bold digit's width at the flag's size; the least room between flags


class Event(NamedTuple):
    """Something at a place of the x axis, by its number in the list of events."""

    x: float
    number: int
    style: int
    label: str


@dataclass(frozen=True)
class Flag:
    """The events that one flag stands for, in their order, and where their lines are."""

    events: tuple[Event, ...]
    places: tuple[float, ...]
    left: float
    right: float

    @property
    def label(self) -> str:
        """The events' numbers."""
        first, last = self.events[0].number, self.events[-1].number
        return str(first) if first == last else f"{first}–{last}"

    @property
    def width(self) -> float:
        """As wide as its label needs."""
        return max(16.0, _LETTER * len(self.label) + 6)

    @property
    def middle(self) -> float:
        """Over its lines, and inside the chart."""
        mean = sum(self.places) / len(self.places)
        return min(max(mean, self.left + self.width / 2), self.right - self.width / 2)

    def meets(self, other: Flag) -> bool:
        """Whether the next flag to the right would touch this one."""
        return self.middle + self.width / 2 + _GAP > other.middle - other.width / 2


def flags(events: Sequence[Event], across: Callable[[float], float], left: float, right: float) -> list[Flag]:
    """The fewest flags for events in the order of their numbers, so that none covers another.

    >>> marks = [Event(x, number, 0, "") for number, x in enumerate([10.0, 12.0, 90.0], 1)]
    >>> [flag.label for flag in flags(marks, float, 0.0, 100.0)]
    ['1–2', '3']
    """
    made: list[Flag] = []
    for event in events:
        place = across(event.x)
        place = left if math.isnan(place) else min(max(place, left), right)  # zero has no place on a logarithm
        made.append(Flag((event,), (place,), left, right))
        while len(made) > 1 and made[-2].meets(made[-1]):
            last, before = made.pop(), made.pop()
            made.append(Flag(before.events + last.events, before.places + last.places, left, right))
    return made


def draw(flag: Flag, top: float, bottom: float) -> str:
    """The flag above the plot, and a line through it for each of its events."""
    styles = {event.style % SERIES for event in flag.events}
    kind = f"s{styles.pop()}" if len(styles) == 1 else "several"
    x, half = flag.middle, flag.width / 2
    lines = "".join(f"M{place:.1f} {top - 4}V{bottom}" for place in flag.places)
    tip = words.text("\n".join(f"{event.number}. {event.label}" for event in flag.events))
    return (
        f'<g class="{kind}"><path class="event" d="{lines}"/>'
        f'<path class="flag" d="M{x - half:.1f} {top - HEIGHT}h{2 * half:.1f}v11l{-half:.1f} 6l{-half:.1f} -6z">'
        f"<title>{tip}</title></path>"
        f'<text class="flagtext" x="{x:.1f}" y="{top - 7}" text-anchor="middle">{flag.label}</text></g>'
    )
