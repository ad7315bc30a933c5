"""A flow graph as SVG: statements in their order, data flow on the right, control flow and calls on the left.

Caller: `laconic code graph`. Edges are arcs between lines, so that any program can be drawn in one pass and read from
top to bottom; a loop is an arc upwards. Kinds of edges differ in side and dash as well as in colour.
"""

from __future__ import annotations

from html import escape as escaped

from laconic.errors import BadInput
from laconic_code.graph import CONTROL, DATA, KINDS, FlowGraph
from laconic_lab.report.style import colours

_LINE, _TOP, _MARGIN, _LETTER = 18, 44, 190, 6.7
_LONGEST = 110  # letters of a statement
_MOST = 3000  # statements; a picture of more is of no use and of many megabytes
_COLOURS = ("--s1", "--s2", "--s3")
_DASHES = ("", "6 3", "2 3")


def draw(graph: FlowGraph, title: str) -> str:
    """The graph as an SVG document that needs nothing else.

    Raises:
        BadInput: it has too many statements for a picture.
    """
    if len(graph) > _MOST:
        raise BadInput(f"{title} has {len(graph):,} statements; at most {_MOST:,} can be drawn")
    lines = [_cut(statement) for statement in graph.abstracted]
    width = _LETTER * max(map(len, lines)) + 12
    height = _TOP + _LINE * (len(graph) + 1)
    body = [_legend(), *(_arc(a, b, kind, _MARGIN + width) for a, b, kind in graph.edges.tolist())]
    for number, (line, statement) in enumerate(zip(lines, graph.statements, strict=True)):
        weight = ' font-weight="bold"' if statement.block < 0 else ""
        tip = f"<title>{escaped(statement.text)}</title>"
        body.append(f'<text x="{_MARGIN + 6}" y="{_y(number) + 4}"{weight}>{tip}{escaped(line)}</text>')
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {2 * _MARGIN + width:.0f} {height}" role="img" '
        f'aria-label="{escaped(f"flow graph of {title}")}">\n<style>{colours()}'
        "svg{background:var(--page)}text{font:11px ui-monospace,monospace;fill:var(--ink);white-space:pre}"
        "path{fill:none;stroke-width:1.1;opacity:.75}</style>\n" + "\n".join(body) + "\n</svg>\n"
    )


def _cut(statement: str) -> str:
    return statement if len(statement) <= _LONGEST else statement[: _LONGEST - 1] + "…"


def _y(number: int) -> int:
    return _TOP + _LINE * number + _LINE // 2


def _arc(source: int, target: int, kind: int, right: float) -> str:
    """An arc as wide as it is long, up to the margin, with a head at its target."""
    reach = min(_MARGIN - 12, 14 + 9 * abs(target - source) ** 0.8)
    x, side = (right, 1) if kind == DATA else (_MARGIN, -1)
    start, end = _y(source), _y(target)
    out = x + side * reach * 1.33
    head = f"M{x + side * 6:.0f} {end - 3}L{x:.0f} {end}L{x + side * 6:.0f} {end + 3}"
    return (
        f'<path class="{KINDS[kind]}" style="stroke:var({_COLOURS[kind]})" stroke-dasharray="{_DASHES[kind]}" '
        f'd="M{x:.0f} {start}C{out:.0f} {start} {out:.0f} {end} {x:.0f} {end}{head}"/>'
    )


def _legend() -> str:
    places = {DATA: "right", CONTROL: "left"}
    words = [f"{name} flow ({places[kind]})" if kind in places else "call and return (left)"
             for kind, name in enumerate(KINDS)]  # fmt: skip
    return "".join(
        f'<path style="stroke:var({_COLOURS[kind]})" stroke-dasharray="{_DASHES[kind]}" d="M{12 + 190 * kind} 18h30"/>'
        f'<text x="{48 + 190 * kind}" y="22">{word}</text>'
        for kind, word in enumerate(words)
    )
