"""Matplotlib's SVG made small and at home in a page: colours, fonts and hints are the page's, and nothing is fetched.

Caller: `canvas.py`. Groups, clips and references that a chart of ours has no use for go; an artist's `gid` becomes its
class, and what a pointer on it reads its title. So a page can hold many drawings, whose names never meet.
"""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Mapping, Sequence

Tips = Mapping[str, Sequence[str]]
OURS = "laconic:"  # begins the gid of an artist that has a class: "laconic:mark", "laconic:mark 7"
_SVG, _LINK = "{http://www.w3.org/2000/svg}", "{http://www.w3.org/1999/xlink}href"
_DROPPED = {f"{_SVG}{name}" for name in ("metadata", "style", "clipPath")}
_GROUPS = {f"{_SVG}g", f"{_SVG}defs"}
_KEPT = ("d", "x", "y", "width", "height", "style", "fill", "patternUnits")
ElementTree.register_namespace("", _SVG[1:-1])


def at_home(svg: bytes, paints: Mapping[str, str], tips: Tips) -> list[ElementTree.Element]:
    """The elements of a drawing for a page.

    Args:
        paints: of each colour that stands for another, what stands there in the page.
        tips: by gid, one text for the artist or one for each of its marks, in their order.
    """
    root = ElementTree.fromstring(svg)
    shapes = {each.get("id", ""): each for each in root.iter(f"{_SVG}path") if each.get("id")}
    return [made for child in root for made in _Tidying(paints, tips, shapes).tidy(child)]


def element(name: str, attributes: dict[str, str], text: str | None = None) -> ElementTree.Element:
    """A new element of SVG."""
    made = ElementTree.Element(f"{_SVG}{name}", attributes)
    made.text = text
    return made


class _Tidying:
    def __init__(self, paints: Mapping[str, str], tips: Tips, shapes: Mapping[str, ElementTree.Element]) -> None:
        self._paints, self._tips, self._shapes = paints, tips, shapes

    def tidy(self, found: ElementTree.Element) -> list[ElementTree.Element]:
        name = found.get("id", "")
        if found.tag in _DROPPED or name in self._shapes:
            return []
        if found.tag == f"{_SVG}use":
            return [self._placed(found)]
        inner = [made for child in found for made in self.tidy(child)]
        if found.tag in _GROUPS and not name.startswith(OURS):
            return inner
        made = ElementTree.Element(found.tag, self._attributes(found))
        made.text = found.text if found.tag == f"{_SVG}text" else None
        made.extend(inner)
        if found.tag == f"{_SVG}pattern":
            made.set("id", name)
        elif name.startswith(OURS):
            made.set("class", name.removeprefix(OURS).split()[0])
            self._hint(made, self._tips.get(name, ()))
        return [made]

    def _placed(self, use: ElementTree.Element) -> ElementTree.Element:
        """A mark as a path of its own, where it was a reference to one."""
        shape = self._shapes[use.get(_LINK, "")[1:]]
        moved = f"translate({use.get('x')} {use.get('y')})"
        style = self._style(use.get("style", shape.get("style", "")))
        return element("path", {"d": _short(shape.get("d", "")), "transform": _short(moved), "style": style})

    def _attributes(self, found: ElementTree.Element) -> dict[str, str]:
        kept = {key: _short(value) for key in _KEPT if (value := found.get(key)) is not None}
        if "style" in kept:
            kept["style"] = self._style(kept["style"])
        if "fill" in kept:
            kept["style"] = self._style(f"fill:{kept.pop('fill')}")
        turned = found.get("transform", "rotate(-0 ")
        if not turned.startswith("rotate(-0 "):
            kept["transform"] = _short(turned)
        return kept

    def _style(self, style: str) -> str:
        parts = [part.strip() for part in style.split(";")]
        kept = ";".join(part.replace(": ", ":") for part in parts if part and not part.startswith("font"))
        return re.sub("#[0-9a-f]{6}", lambda paint: self._paints.get(paint[0], paint[0]), kept)

    def _hint(self, made: ElementTree.Element, texts: Sequence[str]) -> None:
        marks = [made] if len(texts) == 1 else [each for each in made.iter() if each.tag == f"{_SVG}path"]
        for mark, text in zip(marks, texts, strict=False):
            mark.insert(0, element("title", {}, text))


def _short(value: str) -> str:
    """Two digits behind the point are enough for the eye."""
    digits = re.sub(r"-?\d+\.\d+", lambda number: f"{round(float(number[0]), 2):g}", value)
    return re.sub(r"\s+", " ", digits).replace(" z", "z").strip()
