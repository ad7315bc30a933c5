"""Lines with markers over two axes, in a frame of their own: titles with units, a legend, a target, flags of events.

Callers: `figures.py`, the pages of a plan and of a search, and the scripts that draw docs' charts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.ticker import MaxNLocator

from laconic_lab.report import event_flags
from laconic_lab.report.canvas import NARROW, Canvas, Size
from laconic_lab.report.page_svg import OURS

Pair = tuple[float, float]
Scale = Literal["linear", "log", "error"]
LEFT, RIGHT, FOOT = 52.0, 18.0, 46.0  # room around a plot for the ticks' labels and the axis' title


@dataclass(frozen=True)
class ChartAxis:
    """A title with its unit, a scale, and how a tick is written.

    "error" is logarithmic in 1 − value, so that 99 and 99.9 % are as far apart as 90 and 99 %.
    """

    title: str
    scale: Scale
    write: Callable[[float], str] = "{:g}".format


@dataclass(frozen=True)
class Series:
    """One legend entry: a line with markers, thin ones (the seeds) behind it, or markers alone."""

    label: str
    style: int
    line: Sequence[Pair]
    thin: Sequence[Sequence[Pair]] = field(default_factory=list)
    joined: bool = True


@dataclass(frozen=True)
class Target:
    """A dotted line at a height; its words stand in the legend, where no curve crosses them."""

    y: float
    label: str


def curves(
    series: Sequence[Series], x: ChartAxis, y: ChartAxis, size: Size, *, title: str, target: Target | None = None,
    events: Sequence[event_flags.FlagEvent] = (),
) -> Canvas:  # fmt: skip
    """Draw the series; `title` is what a screen reader says.

    At least one of `series` has a point; points outside an axis (zero on a logarithm) are left out.
    """
    canvas, kept = Canvas(size, title), [_drawable(each, x, y) for each in series]
    entries = [(canvas.key(each.style), each.label) for each in kept]
    dotted: dict[str, Any] = {"color": canvas.colour("muted"), "linestyle": ":", "linewidth": 1.6}
    if target is not None:
        entries.append((Line2D([], [], **dotted), target.label))
    above = canvas.legend(entries)
    canvas.resize(size.height + max(0.0, above - 28))
    top = above + 36 + (event_flags.HEIGHT if events else 0)
    canvas.write(0, above + 18, y.title, "axis-title")
    axes = canvas.axes(LEFT, top, size.width - RIGHT, canvas.height - FOOT)
    points = [point for each in kept for line in (each.line, *each.thin) for point in line]
    _span(canvas, axes, "x", x, [a for a, _ in points])
    _span(canvas, axes, "y", y, [b for _, b in points] + ([target.y] if target else []))
    canvas.write(size.width - RIGHT, canvas.height - 6, x.title, "axis-title", ha="right")
    if target is not None:
        axes.axhline(target.y, **dotted)
    event_flags.draw(canvas, axes, events, top)
    for each in kept:
        for line in each.thin:
            canvas.line(axes, each.style, line, linewidth=1, linestyle="solid", alpha=0.35)
    for each in kept:
        _marked(canvas, axes, each, x, y)
    return canvas


def _marked(canvas: Canvas, axes: Axes, series: Series, x: ChartAxis, y: ChartAxis) -> None:
    """The line, about ten markers along it, and a filled one at its end; one point has no line."""
    if len(series.line) > 1 and series.joined:
        canvas.line(axes, series.style, series.line, gid=f"{OURS}line")
    every = math.ceil(len(series.line) / (7 if canvas.size is NARROW else 12)) if series.joined else 1
    chosen = series.line[::-1][:: max(1, every)]
    for some, filled in ((chosen[1:], not series.joined), (chosen[:1], True)):
        marks = canvas.line(axes, series.style, some, linestyle="none", **canvas.marker(series.style, filled))
        canvas.tip(marks, "mark", *(f"{series.label}: {y.write(b)} at {x.write(a)}" for a, b in some))


def _span(canvas: Canvas, axes: Axes, which: Literal["x", "y"], axis: ChartAxis, values: Sequence[float]) -> None:
    """Set an axis' scale, extent and ticks for these values."""
    low, high = extent(values, axis.scale, 0.02 if which == "x" else 0.06)
    ends = (_value(low, axis.scale), _value(high, axis.scale))
    turned = {"functions": (_error_place, _error_value)} if axis.scale == "error" else {}
    scale = "function" if turned else axis.scale
    most = 8 if which == "y" else 6 if canvas.size is NARROW else 10
    places = ticks(low, high, axis.scale, most)
    if which == "x":
        axes.set_xscale(scale, **turned)
        axes.set_xlim(ends)
    else:
        axes.set_yscale(scale, **turned)
        axes.set_ylim(ends)
    drawn = axes.xaxis if which == "x" else axes.yaxis
    canvas.ticks(drawn, places, [axis.write(place) for place in places], grid=which == "y")


def transform(value: float, scale: Scale) -> float:
    """The value as its axis sees it; NaN where it has no place there."""
    if scale == "linear":
        return value
    inner = value if scale == "log" else 1 - value
    if not inner > 0:
        return math.nan
    return math.log10(inner) if scale == "log" else -math.log10(inner)


def _value(place: float, scale: Scale) -> float:
    if scale == "linear":
        return place
    return math.pow(10, place) if scale == "log" else 1 - math.pow(10, -place)


def _error_place(values: Any) -> Any:
    return -np.log10(np.maximum(1 - np.asarray(values, dtype=float), 1e-300))


def _error_value(places: Any) -> Any:
    return 1 - 10.0 ** -np.asarray(places, dtype=float)


def ticks(low: float, high: float, scale: Scale, most: int) -> list[float]:
    """Round values between two transformed ends, at most about `most`.

    >>> ticks(0.0, 10.0, "linear", 6)
    [0.0, 2.0, 4.0, 6.0, 8.0, 10.0]
    >>> ticks(-1.0, 1.0, "log", 8)
    [0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0]
    >>> ticks(0.0, 2.0, "error", 8)
    [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99]
    """
    if scale == "linear":
        found = MaxNLocator(most, steps=[1, 2, 5, 10]).tick_values(low, high)
        return [round(float(v), 12) for v in found if low - 1e-9 <= v <= high + 1e-9]
    ends = (low, high) if scale == "log" else (-high, -low)  # the axis of an error is minus the logarithm
    decades = range(math.floor(ends[0]) - 1, math.ceil(ends[1]) + 2)
    for parts in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        values = [part * 10.0**decade for decade in decades for part in parts]
        if scale == "error":
            values = [round(1 - value, 9) for value in values if value <= 1]
        kept = sorted({round(v, 12) for v in values if low - 1e-9 <= transform(v, scale) <= high + 1e-9})
        if len(kept) <= most:
            return kept
    return kept[:: math.ceil(len(kept) / most)]


def _drawable(series: Series, x: ChartAxis, y: ChartAxis) -> Series:
    def keep(line: Sequence[Pair]) -> list[Pair]:
        return [p for p in line if math.isfinite(transform(p[0], x.scale)) and math.isfinite(transform(p[1], y.scale))]

    return replace(series, line=keep(series.line), thin=[keep(line) for line in series.thin])


def extent(values: Sequence[float], scale: Scale, margin: float) -> Pair:
    """The transformed ends of an axis for these values; one that is nearly zero begins there."""
    seen = [transform(value, scale) for value in values] or [0.0, 1.0]
    low, high = min(seen), max(seen)
    if high - low < 1e-9:
        return low - 0.5, high + 0.5
    start = 0.0 if scale == "linear" and 0 < low < 0.5 * high else low - margin * (high - low)
    return start, high + margin * (high - low)
