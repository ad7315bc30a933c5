"""Bars on a clock: where a step's time goes, how the steps' times are spread, what went on when; and layers by size.

Callers: `figures.py` and the page of a plan. Rows read from top to bottom. A row's name stands above its bar, so that
long names fit on a phone. Parts differ in pattern as well as in colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from laconic import words
from laconic_lab.records.record import TimeSpan
from laconic_lab.report.canvas import NARROW, Canvas, Size
from laconic_lab.report.charts import ticks
from laconic_lab.report.style import PARTS

ROW, LANE, FOOT = 54.0, 38.0, 46.0  # heights: of a row of bars, of a lane, of what is below them
EDGE = 4.0  # of the rows, on the left
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
LABELS = {"compute": "compute", "encode": "encode", "wire": "wire", "wait": "wait for peers", "decode": "decode",
          "other": "other"}  # fmt: skip
_HATCHES = {"encode": "//", "decode": r"\\\\", "wait": "||"}


@dataclass(frozen=True)
class BarPiece:
    """A part of a bar: which of `PARTS` it looks like, where it begins, how long it is, and what a pointer reads."""

    part: str
    begin: float
    length: float
    tip: str


@dataclass(frozen=True)
class Stack:
    """One bar: seconds of each of `PARTS`, and the least seconds its limit allows."""

    label: str
    style: int
    seconds: dict[str, float]
    limit: float | None


@dataclass(frozen=True)
class BarSpread:
    """One row of `QUANTILES` of the step time, and the step time that the tables give, in seconds."""

    label: str
    style: int
    quantiles: Sequence[float]
    step: float


def look(part: str) -> str:
    """The part that is drawn for one: itself, or "other" where a record has a part of which nothing is known."""
    return part if part in LABELS else "other"


def stacked(stacks: Sequence[Stack], size: Size, *, title: str) -> Canvas:
    """Bars of a step's parts from zero, with the link's limit as a tick."""
    used = [part for part in PARTS if any(stack.seconds.get(part, 0) > 0 for stack in stacks)]
    most = max([sum(stack.seconds.values()) for stack in stacks] + [stack.limit or 0 for stack in stacks])
    limit = "least the link allows" if any(stack.limit is not None for stack in stacks) else None
    canvas, axes = _rows(size, title, ROW * len(stacks), most, 92.0, {part: LABELS[part] for part in used}, limit)
    _clock(canvas, axes, most, "time of a step")
    for index, stack in enumerate(stacks):
        top, begin = ROW * index, 0.0
        _name(canvas, axes, stack.label, stack.style, top)
        for part in used:
            length = stack.seconds.get(part, 0.0)
            tip = f"{stack.label}, {LABELS[part]}: {words.seconds(length)}"
            draw(canvas, axes, BarPiece(part, begin, length, tip), top + 22, 22)
            begin += length
        _value(canvas, axes, begin, top + 38, words.seconds(begin))
        if stack.limit is not None:
            drawn = axes.vlines(stack.limit, top + 18, top + 48, colors=canvas.colour("ink"), linewidths=2)
            canvas.tip(drawn, "limit", f"{stack.label}: the link allows no step under {words.seconds(stack.limit)}")
    return canvas


def spreads(rows: Sequence[BarSpread], size: Size, *, title: str) -> Canvas:
    """A thick bar from the quartile to the quartile, a thin line from 5 to 95 %, the median and a dot at 99 %."""
    most = max(row.quantiles[-1] for row in rows)
    canvas, axes = _rows(size, title, ROW * len(rows), most, 92.0, {})
    _clock(canvas, axes, most, "time of a step")
    for index, row in enumerate(rows):
        y, colour = ROW * index + 34, canvas.series_colour(row.style)
        q5, q25, _, q75, q95, q99 = row.quantiles
        _name(canvas, axes, row.label, row.style, ROW * index)
        axes.hlines(y, q5, q95, colors=colour, linewidths=1.6)
        shown = " · ".join(map(words.seconds, (row.step, q95, q99)))
        drawn = axes.hlines(y, q25, max(q75, q25 + most / 1000), colors=colour, linewidths=11, alpha=0.45)
        canvas.tip(drawn, "spread", f"{row.label}: median, 95 % and 99 % of the steps: {shown}")
        axes.vlines(row.step, y - 9, y + 9, colors=colour, linewidths=3)
        axes.plot([q99], [y], marker="o", markersize=6, color=colour, markeredgewidth=0)
        _value(canvas, axes, q99, y + 5, words.seconds(row.step), apart=9)
    return canvas


def timed(spans: Sequence[TimeSpan]) -> list[tuple[str, BarPiece]]:
    """A record's spans as pieces of lanes."""
    return [
        (span.lane, BarPiece(look(span.part), span.begun_s, span.seconds,
                          f"{span.lane}, {LABELS.get(span.part, span.part)}: {words.seconds(span.seconds)}"))
        for span in spans
    ]  # fmt: skip


def lanes(pieces: Sequence[tuple[str, BarPiece]], size: Size, *, title: str, end: float = 0.0) -> Canvas:
    """Pieces from left to right, on lanes in the order they first come; the clock goes to `end` or further."""
    names = list(dict.fromkeys(lane for lane, _ in pieces))
    most = max([piece.begin + piece.length for _, piece in pieces] + [end])
    used = {part: LABELS[part] for part in PARTS if any(piece.part == part for _, piece in pieces)}
    canvas, axes = _rows(size, title, LANE * len(names), most, 18.0, used)
    _clock(canvas, axes, most, "time from the beginning of a step")
    for number, name in enumerate(names):
        canvas.write(0, LANE * number + 15, name, "ink", axes)
        for piece in (piece for lane, piece in pieces if lane == name):
            draw(canvas, axes, piece, LANE * number + 19, 15)
    return canvas


def sizes(rows: Sequence[tuple[str, Sequence[BarPiece]]], legend: dict[str, str], size: Size, *, title: str) -> Canvas:
    """A named bar of bytes for each row; `legend` says what the parts stand for."""
    most = max((sum(piece.length for piece in pieces) for _, pieces in rows), default=0.0)
    canvas, axes = _rows(size, title, 40.0 * len(rows), most, 106.0, legend, foot=8)
    axes.set_axis_off()
    for index, (name, pieces) in enumerate(rows):
        canvas.write(0, 40.0 * index + 13, name, "strong", axes)
        for piece in pieces:
            draw(canvas, axes, piece, 40.0 * index + 18, 14)
        total = sum(piece.length for piece in pieces)
        _value(canvas, axes, total, 40.0 * index + 30, words.nbytes(total))
    return canvas


def draw(canvas: Canvas, axes: Axes, piece: BarPiece, top: float, height: float) -> None:
    """A piece of a bar, with its part's pattern and a thin gap to the next."""
    (bar,) = axes.barh(top + height / 2, piece.length, height, piece.begin, **_filled(canvas, piece.part))
    canvas.tip(bar, f"bar part-{piece.part}", piece.tip)


def _filled(canvas: Canvas, part: str) -> dict[str, Any]:
    return {"facecolor": canvas.colour(part), "edgecolor": canvas.colour("panel"), "linewidth": 0.0,
            "hatch": _HATCHES.get(part)}  # fmt: skip


def _rows(size: Size, title: str, height: float, most: float, right: float, parts: dict[str, str],
          limit: str | None = None, foot: float = FOOT) -> tuple[Canvas, Axes]:  # fmt: skip
    """A canvas with a legend of parts and axes below it, whose heights are pixels; `right` is kept for figures."""
    canvas = Canvas(size, title)
    entries: list[tuple[Artist, str]] = [(Patch(**_filled(canvas, part)), label) for part, label in parts.items()]
    if limit is not None:
        upright: dict[str, Any] = {"marker": "|", "markersize": 16, "markeredgewidth": 2, "linestyle": "none"}
        entries.append((Line2D([], [], color=canvas.colour("ink"), **upright), limit))
    top = canvas.legend(entries) + (4 if entries else 0)
    canvas.resize(top + height + 6 + foot)
    axes = canvas.axes(EDGE, top, size.width - right, top + height + 6)
    axes.set(xlim=(0.0, most or 1.0), ylim=(height + 6, 0))
    return canvas, axes


def _clock(canvas: Canvas, axes: Axes, most: float, what: str) -> None:
    """Seconds or milliseconds from left to right."""
    unit, name = (1.0, "s") if most >= 2 else (1e-3, "ms")
    places = ticks(0.0, max(most, 1e-9) / unit, "linear", 6 if canvas.size is NARROW else 9)
    canvas.ticks(axes.xaxis, [place * unit for place in places], [f"{place:g}" for place in places])
    axes.get_xticklabels()[0].set_horizontalalignment("left")
    canvas.write(canvas.size.width - 18, canvas.height - 6, f"{what} ({name})", "axis-title", ha="right")


def _name(canvas: Canvas, axes: Axes, label: str, style: int, top: float) -> None:
    pixel = axes.get_xlim()[1] / axes.get_window_extent().width
    axes.plot([5 * pixel], [top + 11], linestyle="none", **canvas.marker(style))
    canvas.write(16 * pixel, top + 15, label, "strong", axes)


def _value(canvas: Canvas, axes: Axes, x: float, y: float, text: str, apart: float = 8) -> None:
    pixel = axes.get_xlim()[1] / axes.get_window_extent().width
    canvas.write(x + apart * pixel, y, text, "ink", axes)
