"""Makes docstrings Markdown for the API reference: mkdocs.yml names this file as an extension of Griffe.

Examples and drawings become fenced blocks. `Source:`, `Differs:`, `Cost:` and `Invariant:` become paragraphs of their
own. An entry that names several arguments or errors becomes one entry for each. What is for those who change the code
is left out: `Callers:`, `Subclasses:`, private fields, and `**unknown`, which is there to refuse unknown names.
"""

from __future__ import annotations

import re
import textwrap
from pathlib import Path
from typing import Any

import griffe

LABEL = re.compile(r"(?<!\S)(Callers|Subclasses|Source|Differs|Cost|Invariants?): ")
INTERNAL = ("Callers", "Subclasses")
SEVERAL = re.compile(r"^(\s+)(\w+(?:, \w+)*): (.*)", re.DOTALL)  # an entry such as "low, high: the bounds"
_CODE = (Path(__file__).parents[2] / "src" / "laconic" / "errors.py").read_text()
ERRORS = frozenset(re.findall(r"^class (\w+)", _CODE, re.MULTILINE))
SECTION = re.compile(r"\s*(Args|Returns|Raises|Attributes|Yields|Example|Examples):\s*$")


class Readable(griffe.Extension):
    """Rewrites the docstring of everything that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called once for each object."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)

    def on_function(self, *, func: griffe.Function, **_: object) -> None:
        """Called once for each function."""
        for parameter in list(func.parameters):
            if str(parameter.annotation) == "Never":
                del func.parameters[parameter.name]
                if func.docstring is not None:
                    entry = rf"^    {parameter.name}: .*\n(?:     .*\n)*"
                    func.docstring.value = re.sub(entry, "", func.docstring.value, flags=re.MULTILINE)

    def on_class_members(self, *, cls: griffe.Class, **_: object) -> None:
        """Called once for each class, before its fields become the arguments of a dataclass."""
        fields: list[Any] = [each for each in cls.members.values() if isinstance(each, griffe.Attribute)]
        for each in fields:
            if each.name.startswith("_") and each.annotation is not None:
                cls.del_member(each.name)


def readable(docstring: str) -> str:
    """The docstring as Markdown with Google's sections.

    >>> print(readable("Halve. Source: a paper.\\n\\n>>> 4 / 2\\n2.0\\n"))
    Halve.
    <BLANKLINE>
    **Source:** a paper.
    <BLANKLINE>
    ```pycon
    >>> 4 / 2
    2.0
    ```
    """
    parts = re.split(r"\n\s*\n", textwrap.dedent(docstring).strip("\n"))
    return "\n\n".join(filter(None, (_paragraph(part) for part in parts)))


def _paragraph(part: str) -> str:
    lines = part.split("\n")
    if (section := SECTION.match(lines[0])) and section[1] in ("Returns", "Example", "Examples"):
        # Griffe would take "The job: …" for a type
        inside = textwrap.dedent("\n".join(lines[1:]))
        return f"**Returns:** {inside}" if section[1] == "Returns" else _paragraph(inside)
    first = next((number for number, line in enumerate(lines) if line.lstrip().startswith(">>> ")), None)
    if first is not None:
        indent = re.match(r"\s*", lines[first])[0]  # type: ignore[index]
        fenced = [f"{indent}```pycon", *lines[first:], f"{indent}```"]
        before = _paragraph("\n".join(lines[:first])) if first else ""
        return f"{before}\n\n" * bool(before) + "\n".join(fenced)
    if section:
        return _raises(lines[1:]) if section[1] == "Raises" else "\n".join([lines[0], *_entries(lines[1:])])
    if any(line.lstrip().startswith("├") for line in lines):
        return f"```text\n{part}\n```"
    if lines[0].startswith(" "):  # a section's items keep their indentation
        return part
    pieces = LABEL.split(part)
    said = [pieces[0].rstrip()]
    for label, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if label not in INTERNAL:
            said.append(f"**{label}:** " + re.sub(r"\s*\n\s*", "\n", text).strip())
    return "\n\n".join(filter(None, said))


def _entries(lines: list[str]) -> list[str]:
    """A section's entries, one for each name.

    >>> _entries(["    low, high: the bounds, both", "        inclusive."])
    ['    low: the bounds, both', '        inclusive.', '    high: the bounds, both', '        inclusive.']
    """
    indent = len(lines[0]) - len(lines[0].lstrip()) if lines else 0
    starts = [n for n, line in enumerate(lines) if len(line) - len(line.lstrip()) == indent]
    made: list[str] = []
    for start, end in zip(starts, [*starts[1:], len(lines)], strict=True):
        entry = SEVERAL.match("\n".join(lines[start:end]))
        if entry is None:
            made += lines[start:end]
            continue
        for name in entry[2].split(", "):
            made += f"{entry[1]}{name}: {entry[3]}".split("\n")
    return made


def _raises(lines: list[str]) -> str:
    """What may be raised, as a list; Laconic's own errors are links to their entries.

    >>> print(_raises(["    Mismatch, OSError: it", "        failed."]))
    **Raises:**
    <BLANKLINE>
    - [`Mismatch`][laconic.errors.Mismatch]: it
        failed.
    - `OSError`: it
        failed.
    """
    made = []
    for line in _entries(lines):
        name, colon, said = line.strip().partition(": ")
        if colon and re.fullmatch(r"\w+", name):
            shown = f"[`{name}`][laconic.errors.{name}]" if name in ERRORS else f"`{name}`"
            made.append(f"- {shown}: {said}")
        else:
            made.append(f"    {line.strip()}")
    return "\n".join(["**Raises:**", "", *made])
