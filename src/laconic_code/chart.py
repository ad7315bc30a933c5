"""A map of an embedding as one offline HTML page: statements as points in the plane, near ones near each other.

Caller: `laconic code analogies --map PAGE`. The plane is found by t-SNE on cosines, from principal components; the
most frequent statements take part. A point is a link to the statements that are nearest in the whole embedding. Kinds
of operations differ in shape as well as in colour. The page runs no script.

Source: van der Maaten, Hinton, Visualizing Data using t-SNE, JMLR 2008.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape as escaped
from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic_code.embedding import UNKNOWN, Embedding, normalised
from laconic_code.statements import operation
from laconic_lab.report.templating import document

MOST = 800  # points: more take minutes, and cannot be told apart
NEAREST = 8
_SIZE, _EDGE, _LONGEST = 960, 30, 90
_KINDS = {
    "integers": "add sub mul udiv sdiv urem srem shl lshr ashr and or xor icmp",
    "floats": "fadd fsub fmul fdiv frem fneg fcmp",
    "memory": "load store alloca getelementptr atomicrmw cmpxchg fence",
    "control": "br switch ret phi select unreachable resume indirectbr define landingpad",
    "calls": "call invoke callbr",
    "conversions": "bitcast trunc zext sext fptrunc fpext fptoui fptosi uitofp sitofp ptrtoint inttoptr addrspacecast",
    "vectors and structures": "extractelement insertelement shufflevector extractvalue insertvalue",
}
_OTHER = "others"
_SHAPES = (
    "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0-8 0z", "M-4-4h8v8h-8z", "M0-5L5 4H-5z", "M0-5L5 0 0 5-5 0z", "M0 5L5-4H-5z",
    "M-5-1.5h3.5V-5h3v3.5H5v3H1.5V5h-3V1.5H-5z", "M-5-2.5h10v5h-10z", "M-2.5-5h5v10h-5z",
)  # fmt: skip
_STYLE = """
.map path{cursor:pointer;opacity:.8;fill:var(--c);stroke:none}
@media (max-width:680px){.map a path{transform:scale(2)}}
.key{display:flex;flex-wrap:wrap;gap:4px 20px;font-size:14px}.key svg{width:12px;height:12px;margin-right:6px}
.map a:hover path,.map a:focus path{stroke:var(--ink);stroke-width:2;opacity:1}
.near{display:none;font:13px ui-monospace,monospace;padding:0;list-style:none}
.near:target{display:block}.near li{white-space:pre-wrap;padding:2px 0}.near li:first-child{font-weight:650}
"""


def kind(statement: str) -> str:
    """The group that a statement's operation belongs to."""
    name = operation(statement)
    return next((group for group, names in _KINDS.items() if name in names.split()), _OTHER)


def page(embedding: Embedding, title: str, seed: int = 0, most: int = MOST) -> str:
    """The map as a page that needs nothing else.

    Raises:
        BadInput: there are fewer than five statements.
    """
    names = sorted(embedding.vocabulary, key=embedding.vocabulary.__getitem__)
    shown = [number for number, name in enumerate(names) if name != UNKNOWN][:most]
    if len(shown) < 5:
        raise BadInput(f"a map needs five statements or more, and the vocabulary has {len(shown)}")
    unit = normalised(embedding.vectors)
    places = _plane(unit[shown], seed)
    points = [_point(number, names[row], *place)
              for number, (row, place) in enumerate(zip(shown, places.tolist(), strict=True))]  # fmt: skip
    plane = (
        f'<style>{_STYLE}</style><svg class="map" viewBox="0 0 {_SIZE} {_SIZE}" role="img" '
        f'aria-label="{escaped(f"map of {len(shown)} statements")}">{"".join(points)}</svg>{_legend()}'
    )
    listed = "".join(_near(number, *each) for number, each in enumerate(_nearest(unit, names, shown)))
    meta = f"{len(embedding.vocabulary):,} statements, of which the {len(shown):,} most frequent are shown"
    sections = [("map", "Statements", plane), ("nearest", "Nearest statements by cosine: click a point", listed)]
    return document(title, "embedding of statements", f'<p class="meta">{escaped(meta)}</p>', sections, "")


def _plane(unit: Any, seed: int) -> Any:
    from sklearn.manifold import TSNE

    perplexity = min(30.0, (len(unit) - 1) / 3)
    found = TSNE(2, perplexity=perplexity, metric="cosine", init="random", random_state=seed).fit_transform(unit)
    low, high = found.min(axis=0), found.max(axis=0)
    return _EDGE + (found - low) / np.maximum(high - low, 1e-9) * (_SIZE - 2 * _EDGE)


def _nearest(unit: Any, names: list[str], shown: list[int]) -> Iterator[tuple[str, list[tuple[float, str]]]]:
    cosines = unit[shown] @ unit.T
    cosines[np.arange(len(shown)), shown] = -np.inf
    best = np.argsort(-cosines, axis=1, kind="stable")[:, :NEAREST]
    for place, row in enumerate(shown):
        yield names[row], [(float(cosines[place, other]), names[other]) for other in best[place].tolist()]


def _near(number: int, name: str, others: list[tuple[float, str]]) -> str:
    rows = [escaped(name), *(f"{cosine:.3f}  {escaped(other)}" for cosine, other in others)]
    return f'<ol class="near" id="n{number}">{"".join(f"<li>{row}</li>" for row in rows)}</ol>'


def _group(name: str) -> int:
    return [*_KINDS, _OTHER].index(name)


def _point(number: int, name: str, x: float, y: float) -> str:
    group = _group(kind(name))
    cut = name if len(name) <= _LONGEST else name[: _LONGEST - 1] + "…"
    return (
        f'<a href="#n{number}" transform="translate({x:.0f} {y:.0f})"><path style="--c:var(--s{group})" '
        f'd="{_SHAPES[group]}"><title>{escaped(cut)}</title></path></a>'
    )


def _legend() -> str:
    """Beside the map, not in it: on a narrow screen the map shrinks, and its text would."""
    entries = "".join(
        f'<span><svg class="map" viewBox="-6 -6 12 12"><path style="--c:var(--s{n})" d="{_SHAPES[n]}"/></svg>'
        f"{escaped(group)}</span>"
        for n, group in enumerate([*_KINDS, _OTHER])
    )
    return f'<p class="key">{entries}</p>'
