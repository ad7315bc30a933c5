"""Bars as SVG text: where a step's time goes, and how the steps' times are spread. Rows read from top to bottom.

Callers: `figures.py`. A row's name stands above its bar, so that long names fit on a phone. Parts differ in pattern as
well as in colour.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from laconic.lab.report import words
from laconic.lab.report.charts import WIDE, Size, marker, text_width, ticks, wrap
from laconic.lab.report.style import PARTS, SERIES

ROW, BAR = 54.0, 22.0
QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95, 0.99)
LABELS = {"compute": "compute", "encode": "encode", "wire": "wire", "wait": "wait for peers", "decode": "decode",
          "other": "other"}  # fmt: skip
_HATCH = {"encode": "M-2 10L10 -2M4 16L16 4", "decode": "M-2 2L10 14M-2 -4L16 14", "wait": "M3 3h.01M9 9h.01"}


@dataclass(frozen=True)
class Stack:
    """One bar: seconds of each of `PARTS`, and the least seconds its limit allows."""

    label: str
    style: int
    seconds: dict[str, float]
    limit: float | None


@dataclass(frozen=True)
class Spread:
    """One row of `QUANTILES` of the step time, in seconds."""

    label: str
    style: int
    quantiles: Sequence[float]


def stacked(stacks: Sequence[Stack], size: Size, *, title: str) -> str:
    """Bars of a step's parts from zero, with the link's limit as a tick."""
    used = [part for part in PARTS if any(stack.seconds.get(part, 0) > 0 for stack in stacks)]
    most = max([sum(stack.seconds.values()) for stack in stacks] + [stack.limit or 0 for stack in stacks])
    has_limit = any(stack.limit is not None for stack in stacks)
    signs, top = legend(used, size, has_limit)
    bottom = top + ROW * len(stacks) + 6
    scale = (size.width - 96.0) / (most or 1.0)
    body = [patterns(size), signs, axis(most, scale, top, bottom, size)]
    for index, stack in enumerate(stacks):
        body.append(_stack(stack, used, scale, top + ROW * index, size))
    return wrap("\n".join(body), size, bottom + 46, title)


def _stack(stack: Stack, used: Sequence[str], scale: float, top: float, size: Size) -> str:
    total = sum(stack.seconds.values())
    parts, x, y = [_row_name(stack.label, stack.style, top)], 4.0, top + 22
    for part in used:
        width = scale * stack.seconds.get(part, 0)
        tip = words.text(f"{stack.label}, {LABELS[part]}: {words.seconds(stack.seconds.get(part, 0))}")
        parts.append(f'<g class="part-{part}">{segment(part, x, y, width, BAR, size, tip)}</g>')
        x += width
    parts.append(f'<text class="ink" x="{x + 8:.1f}" y="{y + 16:.0f}">{words.text(words.seconds(total))}</text>')
    if stack.limit is not None:
        place = 4 + scale * stack.limit
        tip = words.text(f"{stack.label}: the link allows no step under {words.seconds(stack.limit)}")
        parts.append(f'<path class="limit" d="M{place:.1f} {y - 4:.0f}v{BAR + 8}"><title>{tip}</title></path>')
    return "".join(parts)


def segment(part: str, x: float, y: float, width: float, height: float, size: Size, tip: str = "") -> str:
    """A bar of a part, with its pattern."""
    box = f'x="{x:.2f}" y="{y:.0f}" width="{max(width, 0):.2f}" height="{height:.0f}"'
    hatch = f'<rect class="hatch" {box} fill="url(#{part}-{size.name})"/>' if part in _HATCH else ""
    return f'<rect class="fill" {box}><title>{tip}</title></rect>{hatch}'


def patterns(size: Size) -> str:
    """The parts' patterns, which a drawing holds once."""
    made = "".join(
        f'<pattern id="{part}-{size.name}" width="12" height="12" patternUnits="userSpaceOnUse">'
        f'<path class="stripe" d="{path}"/></pattern>'
        for part, path in _HATCH.items()
    )
    return f"<defs>{made}</defs>"


def legend(used: Sequence[str], size: Size, has_limit: bool = False) -> tuple[str, float]:
    """The parts by name, and how high that is."""
    x, y, parts = 4.0, 12.0, []
    limit = "least the link allows"
    for part in [*used, *(["limit"] if has_limit else [])]:
        label = LABELS.get(part, limit)
        width = 22 + text_width(label, size) + 20
        if x > 4 and x + width > size.width:
            x, y = 4.0, y + 21
        sign = f'<path class="limit" d="M{x + 7:.0f} {y - 9:.0f}v18"/>'
        if part != "limit":
            sign = f'<g class="part-{part}">{segment(part, x, y - 7, 14, 14, size)}</g>'
        parts.append(f'{sign}<text class="ink" x="{x + 21:.0f}" y="{y + 4:.0f}">{label}</text>')
        x += width
    return "".join(parts), y + 16


def _row_name(label: str, style: int, top: float) -> str:
    name = f'<text class="strong" x="20" y="{top + 15:.0f}">{words.text(label)}</text>'
    return f'<g class="s{style % SERIES}">{marker(style, 9, top + 11)}</g>{name}'


def axis(most: float, scale: float, top: float, bottom: float, size: Size, what: str = "time of a step") -> str:
    """Seconds or milliseconds from left to right."""
    unit, name = (1.0, "s") if most >= 2 else (1e-3, "ms")
    parts = []
    for value in ticks(0.0, max(most, 1e-9) / unit, "linear", 9 if size is WIDE else 6):
        x = 4 + scale * value * unit
        parts.append(f'<path class="grid" d="M{x:.1f} {top:.0f}V{bottom:.0f}"/>')
        anchor = "start" if x < 12 else "middle"
        parts.append(f'<text x="{x:.1f}" y="{bottom + 17:.0f}" text-anchor="{anchor}">{value:g}</text>')
    parts.append(f'<path class="axis" d="M4 {bottom:.0f}H{size.width - 18}"/>')
    parts.append(f'<text class="strong title" x="{size.width - 18}" y="{bottom + 37:.0f}" text-anchor="end">'
                 f"{what} ({name})</text>")  # fmt: skip
    return "".join(parts)


def spreads(rows: Sequence[Spread], size: Size, *, title: str) -> str:
    """A thick bar from the quartile to the quartile, a thin line from 5 to 95 %, the median and a dot at 99 %."""
    most = max(row.quantiles[-1] for row in rows)
    bottom = ROW * len(rows) + 6
    scale = (size.width - 96.0) / (most or 1.0)
    body = [axis(most, scale, 0, bottom, size)]
    for index, row in enumerate(rows):
        y = ROW * index + 34
        q5, q25, q50, q75, q95, q99 = (4 + scale * value for value in row.quantiles)
        shown = " · ".join(words.seconds(row.quantiles[i]) for i in (2, 4, 5))
        tip = words.text(f"{row.label}: median, 95 % and 99 % of the steps: {shown}")
        body.append(
            f'{_row_name(row.label, row.style, ROW * index)}<g class="s{row.style % SERIES}"><title>{tip}</title>'
            f'<path class="whisker" d="M{q5:.1f} {y}H{q95:.1f}"/>'
            f'<path class="box" d="M{q25:.1f} {y}H{max(q75, q25 + 1):.1f}"/>'
            f'<path class="middle" d="M{q50:.1f} {y - 9}v18"/><circle class="flag" cx="{q99:.1f}" cy="{y}" r="3"/></g>'
            f'<text class="ink" x="{q99 + 9:.1f}" y="{y + 5}">{words.text(words.seconds(row.quantiles[2]))}</text>'
        )
    return wrap("\n".join(body), size, bottom + 46, title)
