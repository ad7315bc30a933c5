"""One drawing by matplotlib in the page's colours: as SVG light or dark with its reader, as PNG light.

Callers: `charts.py`, `bars.py`, and scripts with a chart of their own. A chart is drawn twice, wide and narrow, since
scaling one drawing down to a phone would make its words unreadable. Places are in pixels from the top left.
"""

from __future__ import annotations

import io
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from laconic_lab.report.page_svg import OURS, at_home, element
from laconic_lab.report.style import DASHES, LIGHT, MARKERS, SERIES, chart_style

_INCH = 72.0  # a pixel of the page is a point of matplotlib
_PAINTS = {name: f"#f0e1{number:02x}" for number, name in enumerate(LIGHT)}  # stand for the colours until the page
_VARIABLES = {paint: f"var(--{name})" for name, paint in _PAINTS.items()}
MARGIN = 16  # of a drawing that stands alone: keeps words off a picture's edge


@dataclass(frozen=True)
class Size:
    """A drawing's extent in pixels, and that of its letters."""

    name: str
    width: int
    height: int
    font: int


WIDE, NARROW, PAPER = Size("wide", 1000, 430, 13), Size("narrow", 366, 350, 12), Size("paper", 1000, 430, 13)


class Canvas:
    """A drawing under construction; `title` is what a screen reader says."""

    def __init__(self, size: Size, title: str) -> None:
        self.size, self.title, self.height = size, title, float(size.height)
        self.figure = Figure(figsize=(size.width / _INCH, self.height / _INCH), dpi=_INCH)
        self.figure.patch.set_visible(False)
        self._tips: dict[str, tuple[str, ...]] = {}

    def colour(self, name: str) -> str:
        """A colour of `style.py`, as matplotlib takes it."""
        return LIGHT[name] if self.size is PAPER else _PAINTS[name]

    def series_colour(self, style: int) -> str:
        """The colour of a series."""
        return self.colour(f"s{style % SERIES}")

    def resize(self, height: float) -> None:
        """Set the height, before axes are made."""
        self.height = height
        self.figure.set_size_inches(self.size.width / _INCH, height / _INCH)

    def axes(self, left: float, top: float, right: float, bottom: float) -> Axes:
        """Axes between these places, with a line below and without ticks."""
        width, height = self.size.width, self.height
        shares = (left / width, 1 - bottom / height, (right - left) / width, (bottom - top) / height)
        made = self.figure.add_axes(shares)
        made.patch.set_visible(False)
        made.spines[["left", "top", "right"]].set_visible(False)
        made.spines["bottom"].set(color=self.colour("line"), linewidth=1)
        for axis in (made.xaxis, made.yaxis):
            self.ticks(axis, [], [], grid=False)
        return made

    def ticks(self, axis: Any, places: Sequence[float], labels: Sequence[str], grid: bool = True) -> None:
        """Label these places of an axis, with lines through the plot or without."""
        axis.set_ticks(places, [_literal(label) for label in labels])
        axis.set_ticks([], minor=True)
        axis.set_tick_params(length=0, pad=6, labelsize=self.size.font, labelcolor=self.colour("muted"))
        if grid:
            axis.grid(color=self.colour("grid"), linewidth=1)
            axis.axes.set_axisbelow(True)

    def write(self, x: float, y: float, text: str, kind: str = "plain", axes: Axes | None = None, **look: Any) -> None:
        """Write at a place of the drawing, or of the values of `axes`.

        `kind` is the text's class: plain, small, ink, strong or axis-title.
        """
        bold = "bold" if kind in ("strong", "axis-title") else "normal"
        colour = self.colour("muted" if kind in ("plain", "small") else "ink")
        look = {"fontsize": self.size.font - 2 * (kind == "small"), "color": colour, "weight": bold, **look}
        place = (x, y) if axes is not None else (x / self.size.width, 1 - y / self.height)
        (axes or self.figure).text(*place, _literal(text), gid=OURS + kind, **look)

    def line(self, axes: Axes, style: int, points: Sequence[tuple[float, float]], **look: Any) -> Line2D:
        """Draw a series' line, in its colour and dashes."""
        (made,) = axes.plot([x for x, _ in points], [y for _, y in points], **{**self._stroke(style), **look})
        return made

    def _stroke(self, style: int) -> dict[str, Any]:
        return {"color": self.series_colour(style), "linestyle": DASHES[style % SERIES], "linewidth": 2.0}

    def marker(self, style: int, filled: bool = False) -> dict[str, Any]:
        """The marker of a series, as matplotlib takes it: each has a shape of its own."""
        colour = self.series_colour(style)
        return {"marker": MARKERS[style % SERIES], "markersize": 8, "markeredgewidth": 1.7, "markeredgecolor": colour,
                "markerfacecolor": colour if filled else self.colour("panel")}  # fmt: skip

    def key(self, style: int) -> Line2D:
        """A series in a legend: a piece of its line with its marker."""
        return Line2D([], [], **self._stroke(style), **self.marker(style))

    def legend(self, entries: Sequence[tuple[Artist, str]]) -> float:
        """Put entries at the top, in as many columns as fit; returns the height that they take."""
        if not entries:
            return 0.0
        handles, labels = [artist for artist, _ in entries], [_literal(label) for _, label in entries]
        for columns in range(len(entries), 0, -1):
            made = self.figure.legend(
                handles, labels, ncols=columns, loc="upper left", bbox_to_anchor=(0, 1), frameon=False, borderpad=0.2,
                borderaxespad=0, handlelength=2.4, columnspacing=1.6, fontsize=self.size.font,
                labelcolor=self.colour("ink"),
            )  # fmt: skip
            box = made.get_window_extent()
            if box.width <= self.size.width or columns == 1:
                break
            made.remove()
        return float(box.height) + 6

    def tip(self, artist: Artist, kind: str, *texts: str) -> None:
        """Give an artist a class, and say what a pointer on it reads: one text, or one for each of its marks."""
        gid = f"{OURS}{kind} {len(self._tips)}"
        self._tips[gid] = texts
        artist.set_gid(gid)

    def svg(self) -> str:
        """The drawing as an element of a page with `chart_style`."""
        return self._written({"viewBox": f"0 0 {self.size.width} {self.height:g}"}, [])

    def alone(self) -> str:
        """The drawing as a file of its own, with a margin; light or dark as its reader is."""
        box = {"x": str(-MARGIN), "y": str(-MARGIN), "width": f"{self.size.width + 2 * MARGIN}",
               "height": f"{self.height + 2 * MARGIN:g}"}  # fmt: skip
        before = [element("style", {}, chart_style()), element("rect", {**box, "style": "fill:var(--panel)"})]
        return self._written({"viewBox": " ".join(box.values())}, before) + "\n"

    def png(self) -> bytes:
        """The drawing as a picture, two pixels to the unit; one of `PAPER`, since a picture has one set of colours."""
        self.figure.patch.set_visible(True)
        return self._saved("png", dpi=2 * _INCH, facecolor=self.colour("panel"))

    def _written(self, attributes: dict[str, str], before: list[ElementTree.Element]) -> str:
        told = {"class": f"chart {self.size.name}", "role": "img", "aria-label": self.title}
        root = element("svg", {**told, **attributes})
        root.extend([*before, *at_home(self._saved("svg", metadata={"Date": None}), _VARIABLES, self._tips)])
        return ElementTree.tostring(root, encoding="unicode")

    def _saved(self, kind: str, **options: Any) -> bytes:
        file, salt = io.BytesIO(), f"{self.title} {self.size.name}"  # no two drawings of a page name a pattern alike
        looks: dict[Any, Any] = {"svg.fonttype": "none", "svg.hashsalt": salt, "hatch.linewidth": 1.6}
        with matplotlib.rc_context(looks):
            self.figure.savefig(file, format=kind, **options)
        return file.getvalue()


def _literal(text: str) -> str:
    """A text without formulas: what stands between two dollars is no TeX."""
    return text.replace("$", r"\$")


def swatch(style: int) -> str:
    """A series' marker on a piece of its line, for tables."""
    canvas = Canvas(Size("swatch", 18, 18, 12), "")
    axes = canvas.axes(0, 0, 18, 18)
    axes.set(xlim=(0, 18), ylim=(0, 18))
    axes.set_axis_off()
    canvas.line(axes, style, [(0, 9), (18, 9)])
    axes.plot([9], [9], **canvas.marker(style))
    return canvas.svg().replace('role="img" aria-label=""', 'aria-hidden="true"')
