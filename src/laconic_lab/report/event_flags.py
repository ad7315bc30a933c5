"""Numbered flags on a chart's x axis: what happened when. Flags that would cover each other become one.

Callers: `charts.py`. Every event keeps its own dotted line; a flag that stands for several says "3–7". The numbers are
those of the list below the chart.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from matplotlib.axes import Axes

from laconic_lab.report.canvas import Canvas
from laconic_lab.report.page_svg import OURS
from laconic_lab.report.style import SERIES

HEIGHT = 18  # of a flag, with the room around it
_LETTER, _GAP = 7.7, 2.0  # a bold digit's width at the flag's size; the least room between flags


class FlagEvent(NamedTuple):
    """Something at a place of the x axis, by its number in the list of events."""

    x: float
    number: int
    style: int
    label: str


@dataclass(frozen=True)
class Flag:
    """The events that one flag stands for, in their order, and where their lines are."""

    events: tuple[FlagEvent, ...]
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


def flags(events: Sequence[FlagEvent], across: Callable[[float], float], left: float, right: float) -> list[Flag]:
    """The fewest flags for events in the order of their numbers, so that none covers another.

    >>> marks = [FlagEvent(x, number, 0, "") for number, x in enumerate([10.0, 12.0, 90.0], 1)]
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


def draw(canvas: Canvas, axes: Axes, events: Sequence[FlagEvent], top: float) -> None:
    """Flags above the plot, which begins at `top`, and a line through it for each of the events."""
    box = axes.get_window_extent()
    for flag in flags(events, lambda x: float(axes.transData.transform((x, 0))[0]), box.x0, box.x1):
        styles = {event.style % SERIES for event in flag.events}
        colour = canvas.series_colour(styles.pop()) if len(styles) == 1 else canvas.colour("muted")
        shares = [(place - box.x0) / box.width for place in flag.places]
        axes.vlines(shares, 0, 1, transform=axes.transAxes, colors=colour, linestyles=":", linewidths=1.2,
                    gid=f"{OURS}event")  # fmt: skip
        made = canvas.figure.text(
            flag.middle / canvas.size.width, 1 - (top - HEIGHT / 2 - 2) / canvas.height, flag.label, ha="center",
            va="center_baseline", fontsize=11, weight="bold", color=canvas.colour("panel"),
            bbox={"boxstyle": "square,pad=0.22", "facecolor": colour, "linewidth": 0},
        )  # fmt: skip
        canvas.tip(made, "flag", "\n".join(f"{event.number}. {event.label}" for event in flag.events))
