"""Charts as SVG text: axes with units, lines with markers, a legend. No plotting package, no script.

Callers: `figures.py`. A chart is drawn twice, wide and narrow, since scaling one drawing down to a phone would make its
words unreadable; the page shows one of them. Colours come from `style.py` by class.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Literal

from laconic.lab.report import flags, words
from laconic.lab.report.style import DASHES, SERIES

Pair = tuple[float, float]
Scale = Literal["linear", "log", "error"]
SHAPES = ((0, 0.0), (4, 45.0), (3, 90.0), (4, 0.0), (3, -90.0), (6, 0.0), (5, 90.0), (8, 22.5))  # corners, turned by
LETTER = 0.56  # mean width of a letter, of the font's size


@dataclass(frozen=True)
class Size:
    """A drawing's extent in its own units, which are pixels when it is shown unscaled."""

    name: str
    width: int
    height: int
    font: int


WIDE, NARROW = Size("wide", 1000, 430, 13), Size("narrow", 366, 350, 12)


@dataclass(frozen=True)
class Axis:
    """A title with its unit, a scale, and how a tick is written.

    "error" is logarithmic in 1 − value, so that 99 and 99.9 % are as far apart as 90 and 99 %.
    """

    title: str
    scale: Scale
    write: Callable[[float], str]


@dataclass(frozen=True)
class Series:
    """One legend entry: a line with markers, and thin ones (the seeds) behind it."""

    label: str
    style: int
    line: Sequence[Pair]
    thin: Sequence[Sequence[Pair]] = field(default_factory=list)


@dataclass(frozen=True)
class Target:
    """A dotted line at a height, with words on it."""

    y: float
    label: str


@dataclass(frozen=True)
class _Frame:
    """From values to places: the plot's corners and the transformed ranges."""

    x: Axis
    y: Axis
    left: float
    top: float
    right: float
    bottom: float
    x_range: Pair
    y_range: Pair

    def across(self, value: float) -> float:
        low, high = self.x_range
        return self.left + (self.right - self.left) * (transform(value, self.x.scale) - low) / (high - low)

    def up(self, value: float) -> float:
        low, high = self.y_range
        return self.bottom - (self.bottom - self.top) * (transform(value, self.y.scale) - low) / (high - low)


def curves(
    series: Sequence[Series], x: Axis, y: Axis, size: Size, *, title: str, target: Target | None = None,
    events: Sequence[flags.Event] = (),
) -> str:  # fmt: skip
    """Lines with markers over two axes; `title` is what a screen reader says.

    At least one of `series` has a point; points outside an axis (zero on a logarithm) are left out.
    """
    kept = [_drawable(each, x, y) for each in series]
    points = [point for each in kept for line in (each.line, *each.thin) for point in line]
    legend, legend_height = _legend([each for each in kept if each.label], size)
    top = legend_height + 38 + (flags.HEIGHT if events else 0)
    heights = [p[1] for p in points] + ([target.y] if target else [])
    frame = _Frame(x, y, 52.0, top, size.width - 18.0, size.height - 46.0,
                   _range([p[0] for p in points], x.scale, 0.02), _range(heights, y.scale, 0.06))  # fmt: skip
    body = [legend, _axes(frame, size, legend_height)]
    if target is not None:
        lines = [line for each in kept for line in (each.line, *each.thin)]
        body.append(_target(frame, target, lines, size))
    body += [flags.draw(flag, top, frame.bottom) for flag in flags.flags(events, frame.across, frame.left, frame.right)]
    body += [_thin(frame, each) for each in kept]
    body += [_line(frame, each, size) for each in kept]
    return wrap("\n".join(body), size, size.height, title)


def wrap(body: str, size: Size, height: float, title: str) -> str:
    """The svg element around a chart."""
    return (
        f'<svg class="chart {size.name}" viewBox="0 0 {size.width} {height:.0f}" role="img" '
        f'aria-label="{words.text(title)}" xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'
    )


def transform(value: float, scale: Scale) -> float:
    """The value as its axis sees it; NaN where it has no place there."""
    if scale == "linear":
        return value
    inner = value if scale == "log" else 1 - value
    if not inner > 0:
        return math.nan
    return math.log10(inner) if scale == "log" else -math.log10(inner)


def marker(style: int, x: float, y: float, radius: float = 4.2, extra: str = "", tip: str = "") -> str:
    """The marker of a series: each has a shape of its own."""
    corners, turn = SHAPES[style % SERIES]
    inner = f"<title>{words.text(tip)}</title>" if tip else ""
    if corners == 0:
        return f'<circle class="mark{extra}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}">{inner}</circle>'
    reach = radius * (1.35 if corners == 3 else 1.2)
    places = [
        (x + reach * math.cos(math.radians(turn + 360 * i / corners)),
         y - reach * math.sin(math.radians(turn + 360 * i / corners)))
        for i in range(corners)
    ]  # fmt: skip
    path = " ".join(f"{px:.1f},{py:.1f}" for px, py in places)
    return f'<polygon class="mark{extra}" points="{path}">{inner}</polygon>'


def swatch(style: int) -> str:
    """A series' marker on a piece of its line, for tables."""
    return (
        f'<svg class="chart s{style % SERIES}" viewBox="0 0 18 18" aria-hidden="true">'
        f'<path class="line" stroke-dasharray="{DASHES[style % SERIES]}" d="M0 9H18"/>{marker(style, 9, 9)}</svg>'
    )


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
        step = next(s for s in _steps(high - low) if (high - low) / s < most)
        first = math.ceil(low / step - 1e-9)
        return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]
    decades = range(math.floor(low) - 1, math.ceil(high) + 2)
    if scale == "error":  # the axis is minus the logarithm
        decades = range(-math.ceil(high) - 1, -math.floor(low) + 2)
    for parts in ((1.0, 2.0, 5.0), (1.0, 3.0), (1.0,)):
        values = sorted(part * 10.0**decade for decade in decades for part in parts)
        if scale == "error":
            values = sorted({round(1 - value, 9) for value in values if value <= 1})
        kept = [round(v, 12) for v in values if low - 1e-9 <= transform(v, scale) <= high + 1e-9]
        if len(kept) <= most:
            return kept
    return kept[:: math.ceil(len(kept) / most)]


def _steps(extent: float) -> list[float]:
    decade = 10.0 ** math.floor(math.log10(extent) - 2) if extent > 0 else 1.0
    return [decade * step for power in range(5) for step in (10.0**power, 2 * 10.0**power, 5 * 10.0**power)]


def text_width(words_: str, size: Size) -> float:
    """About how wide a text is."""
    return LETTER * size.font * len(words_)


def _drawable(series: Series, x: Axis, y: Axis) -> Series:
    def keep(line: Sequence[Pair]) -> list[Pair]:
        return [p for p in line if math.isfinite(transform(p[0], x.scale)) and math.isfinite(transform(p[1], y.scale))]

    return Series(series.label, series.style, keep(series.line), [keep(line) for line in series.thin])


def _range(values: Sequence[float], scale: Scale, margin: float) -> Pair:
    seen = [transform(value, scale) for value in values] or [0.0, 1.0]
    low, high = min(seen), max(seen)
    if high - low < 1e-9:
        return low - 0.5, high + 0.5
    start = 0.0 if scale == "linear" and low > 0 and low < 0.5 * high else low - margin * (high - low)
    return start, high + margin * (high - low)


def _legend(series: Sequence[Series], size: Size) -> tuple[str, float]:
    """Entries in rows from the top left; returns their height too."""
    x, y, parts = 4.0, 12.0, []
    for each in series:
        width = 34 + text_width(each.label, size) + 22
        if x > 4 and x + width > size.width:
            x, y = 4.0, y + 21
        dash = DASHES[each.style % SERIES]
        parts.append(
            f'<g class="s{each.style % SERIES}"><path class="line" stroke-dasharray="{dash}" d="M{x:.0f} {y:.0f}h26"/>'
            f"{marker(each.style, x + 13, y)}"
            f'<text class="ink" x="{x + 33:.0f}" y="{y + 4:.0f}">{words.text(each.label)}</text></g>'
        )
        x += width
    return "".join(parts), y + 12


def _axes(frame: _Frame, size: Size, legend_height: float) -> str:
    parts = [f'<text class="strong title" x="4" y="{legend_height + 18:.0f}">{words.text(frame.y.title)}</text>']
    for value in ticks(*frame.y_range, frame.y.scale, 8):
        y, label = frame.up(value), words.text(frame.y.write(value))
        parts.append(f'<path class="grid" d="M{frame.left} {y:.1f}H{frame.right}"/>')
        parts.append(f'<text x="{frame.left - 8}" y="{y + 4:.1f}" text-anchor="end">{label}</text>')
    edge = -math.inf
    for value in ticks(*frame.x_range, frame.x.scale, 10 if size is WIDE else 6):
        x, label = frame.across(value), frame.x.write(value)
        half = text_width(label, size) / 2
        parts.append(f'<path class="axis" d="M{x:.1f} {frame.bottom}v5"/>')
        if x - half > edge + 6 and x + half <= size.width:
            parts.append(f'<text x="{x:.1f}" y="{frame.bottom + 19}" text-anchor="middle">{words.text(label)}</text>')
            edge = x + half
    parts.append(f'<path class="axis" d="M{frame.left} {frame.bottom}H{frame.right}"/>')
    parts.append(f'<text class="strong title" x="{frame.right}" y="{frame.bottom + 39}" text-anchor="end">'
                 f"{words.text(frame.x.title)}</text>")  # fmt: skip
    return "\n".join(parts)


def _target(frame: _Frame, target: Target, lines: Sequence[Sequence[Pair]], size: Size) -> str:
    """The dotted line, and its words at whichever place on it the curves cross least."""
    y, width = frame.up(target.y), text_width(target.label, size)
    drawn = [place for line in lines for place in _along([(frame.across(a), frame.up(b)) for a, b in line])]
    starts = [frame.left + 4, frame.right - width - 4, (frame.left + frame.right - width) / 2]
    places = [(x, base) for base in (y - 6, y + size.font + 4) for x in starts if base < frame.bottom]

    def crossings(place: Pair) -> int:
        x, base = place
        return sum(x - 5 <= px <= x + width + 5 and base - size.font <= py <= base + 4 for px, py in drawn)

    x, base = min(places, key=crossings)
    return (
        f'<path class="target" d="M{frame.left} {y:.1f}H{frame.right}"/>'
        f'<text x="{x:.1f}" y="{base:.1f}">{words.text(target.label)}</text>'
    )


def _along(line: Sequence[Pair]) -> list[Pair]:
    """Places along a line of points, close enough to notice a word that it crosses."""
    between = [
        (a[0] + (b[0] - a[0]) * i / 16, a[1] + (b[1] - a[1]) * i / 16)
        for a, b in pairwise(line) for i in range(1, 16)
    ]  # fmt: skip
    return [*line, *between]


def _path(frame: _Frame, line: Sequence[Pair]) -> str:
    return "M" + "L".join(f"{frame.across(x):.1f} {frame.up(y):.1f}" for x, y in line)


def _thin(frame: _Frame, series: Series) -> str:
    lines = "".join(f'<path class="thin" d="{_path(frame, line)}"/>' for line in series.thin if len(line) > 1)
    return f'<g class="s{series.style % SERIES}">{lines}</g>'


def _line(frame: _Frame, series: Series, size: Size) -> str:
    """The line, about ten markers along it, and a filled one at its end; one point has no line."""
    if not series.line:
        return ""
    dash = DASHES[series.style % SERIES]
    path = f'<path class="line" stroke-dasharray="{dash}" d="{_path(frame, series.line)}"/>'
    every = max(1, math.ceil(len(series.line) / (12 if size is WIDE else 7)))
    last = len(series.line) - 1
    chosen = sorted({*range(last, -1, -every), last})
    marks = "".join(
        marker(series.style, frame.across(x), frame.up(y), extra=" last" if i == last else "",
               tip=f"{series.label}: {frame.y.write(y)} at {frame.x.write(x)}")
        for i in chosen for x, y in [series.line[i]]
    )  # fmt: skip
    return f'<g class="s{series.style % SERIES}">{path if last else ""}{marks}</g>'
