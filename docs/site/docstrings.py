"""Makes docstrings Markdown for the API reference: mkdocs.yml names this file as an extension of Griffe.

Examples become fenced blocks. `Source:`, `Differs:`, `Cost:` and `Invariant:` become paragraphs of their own.
`Callers:`, which is for those who change the code, is left out.
"""

from __future__ import annotations

import re
import textwrap

import griffe

LABEL = re.compile(r"(?<!\S)(Callers|Source|Differs|Cost|Invariants?): ")
SECTION = re.compile(r"\s*(Args|Returns|Raises|Attributes|Yields|Example|Examples):\s*$")


class Readable(griffe.Extension):
    """Rewrites the docstring of everything that is loaded."""

    def on_object(self, *, obj: griffe.Object, **_: object) -> None:
        """Called once for each object."""
        if obj.docstring is not None:
            obj.docstring.value = readable(obj.docstring.value)


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
    if section or lines[0].startswith(" "):  # a section's items keep their indentation
        return part
    pieces = LABEL.split(part)
    said = [pieces[0].rstrip()]
    for label, text in zip(pieces[1::2], pieces[2::2], strict=True):
        if label != "Callers":
            said.append(f"**{label}:** " + re.sub(r"\s*\n\s*", "\n", text).strip())
    return "\n\n".join(filter(None, said))
