"""A step on the clock as SVG text: a lane for the training and one for each bucket's layers, bars for what went on.

Callers: `figures.py`. Bars look as in the step's breakdown (`bars.py`): parts differ in pattern as well as in colour.
"""

from __future__ import annotations

from collections.abc import Sequence

from laconic.lab.records.record import Span
from laconic.lab.report import words
from laconic.lab.report.bars import LABELS, axis, legend, patterns, segment
from laconic.lab.report.charts import Size, wrap
from laconic.lab.report.style import PARTS

LANE, BAR = 38.0, 15.0


def lanes(spans: Sequence[Span], size: Size, *, title: str) -> str:
    """The spans from left to right, a lane below the other in the order they first come."""
    names = list(dict.fromkeys(span.lane for span in spans))
    most = max(span.begun_s + span.seconds for span in spans)
    signs, top = legend([part for part in PARTS if any(span.part == part for span in spans)], size)
    bottom, scale = top + LANE * len(names) + 6, (size.width - 22.0) / (most or 1.0)
    body = [patterns(size), signs, axis(most, scale, top, bottom, size, what="time from the beginning of a step")]
    for number, name in enumerate(names):
        y = top + LANE * number
        body.append(f'<text class="ink" x="4" y="{y + 15:.0f}">{words.text(name)}</text>')
        body += [_bar(span, scale, y + 19, size) for span in spans if span.lane == name]
    return wrap("\n".join(body), size, bottom + 46, title)


def _bar(span: Span, scale: float, y: float, size: Size) -> str:
    tip = words.text(f"{span.lane}, {LABELS[span.part]}: {words.seconds(span.seconds)}")
    drawn = segment(span.part, 4 + scale * span.begun_s, y, scale * span.seconds, BAR, size, tip)
    return f'<g class="part-{span.part}">{drawn}</g>'
