"""Statements of IR text and their abstraction: names, literals and structure types no longer tell programs apart.

Callers: `graph.py`, and the tasks for old IR. Pure text, so that it reads what any LLVM prints, with typed pointers or
without.

    %5 = load %struct.pair, ptr %4, align 8, !tbaa !3   →   <%ID> = load { i32, float }, ptr <%ID>, align 8

Source: Ben-Nun, Jakobovits, Hoefler, Neural Code Comprehension, NeurIPS 2018, §4.1.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

_NAME = r'(?:"(?:[^"\\]|\\.)*"|[-\w$.]+)'
LOCAL = re.compile(rf"%{_NAME}")
GLOBAL = re.compile(rf"@{_NAME}")
_LABEL = re.compile(rf"^(?:; <label>:)?({_NAME}):")
_TYPE = re.compile(rf"^(%{_NAME}) = type (.*)$")
_METADATA = re.compile(
    r'(?P<quoted>"(?:[^"\\]|\\.)*")'
    rf"|(?:,\s*)?!{_NAME}(?:\([^()]*\)|\s+!(?:{_NAME}|\{{[^}}]*\}}))?|\s#\d+\b|\s*;.*$"
)
_STRING = re.compile(r'(?P<name>"(?:[^"\\]|\\.)*")|\bc"(?:[^"\\]|\\.)*"')  # a name may end in c and a quote
_NUMBER = r"-?\d+"
# What is kept as it stands comes first: sizes of arrays and vectors, alignments, numbers in an attribute's brackets.
_TOKENS = re.compile(
    r'(?P<string>c"(?:[^"\\]|\\.)*")'
    r"|(?P<kept>\b\d+ x |\balign \d+|\b[a-z_]+\(-?\d+(?:, ?-?\d+)*\)|<%ID>|<@ID>|<INT>|<FLOAT>|<STRING>|<TYP>(?: \d+$)?"
    r"|\[ -?\d+(?=,))"  # a phi's numbers stay: 0 and 1 tell a counter from a flag
    rf"|(?P<local>%{_NAME})|(?P<global>@{_NAME})"
    r"|(?P<float>(?<![\w.])-?\d+\.\d+(?:e[+-]?\d+)?|\b0x[KMLHR]?[0-9A-Fa-f]+)"
    rf"|(?P<int>(?<![\w.<]){_NUMBER}(?![\w.]))"
)
_ELEMENT = re.compile(r"(?:insert|extract)element <[^>]*> ")
_FIELD = re.compile(rf"((?:insert|extract)value .*?)((?:, {_NUMBER})+)$")
_DEEPEST = 12  # structure types in each other; one that holds itself ends as `opaque`


@dataclass(frozen=True)
class Statement:
    """One statement of a module.

    Args:
        text: as LLVM prints it, on one line, without metadata.
        function: the name of the function that it is in, or "" for a global.
        block: the number of its block in the function, from 0; a `define` stands before block 0, at -1.
        label: the name of its block.
    """

    text: str
    function: str = ""
    block: int = -1
    label: str = ""

    @property
    def defines(self) -> str | None:
        """The name of the value that it defines, with its % or @; None for stores, branches and such."""
        found = re.match(rf"([%@]{_NAME}) = ", self.text)
        return found[1] if found else None

    @property
    def operation(self) -> str:
        """The operation's name: add, load, call, br, define, global, …"""
        return operation(self.text)


def operation(text: str) -> str:
    """The name of a statement's operation, abstract or not.

    >>> operation("<%ID> = tail call i64 <@ID>(i32 <INT>)")
    'call'
    """
    if text.startswith(("@", "<@ID> =")):
        return "global"
    words = re.sub(rf"^(?:%{_NAME}|<%ID>) = ", "", text).split()
    return words[1] if words[0] in ("tail", "musttail", "notail") else words[0]


def abstract(text: str, types: Mapping[str, str] | None = None) -> str:
    """A statement without its names and literals; structure types are written out.

    >>> abstract("%3 = add nsw i32 %2, 7")
    '<%ID> = add nsw i32 <%ID>, <INT>'

    Args:
        types: the module's structure types by name, as `type_bodies` finds them.
    """
    text = _inlined(_bare(text), types or {}, _DEEPEST)
    text = _STRING.sub(lambda found: found["name"] or " <STRING>", text)
    if found := _ELEMENT.search(text):  # the vector's type says it already
        text = text[: found.end()] + re.sub(r", i\d+ ", ", <TYP> ", text[found.end() :])
    if found := _FIELD.search(text):
        return _abstracted(text[: found.start(2)]) + found[2]
    return _abstracted(text)


def _abstracted(text: str) -> str:
    def replaced(found: re.Match[str]) -> str:
        kind = found.lastgroup or ""
        names = {"local": "<%ID>", "global": "<@ID>", "float": "<FLOAT>", "int": "<INT>", "string": "<STRING>"}
        return found[0] if kind == "kept" else names[kind]

    return _TOKENS.sub(replaced, text).rstrip()


def _inlined(text: str, types: Mapping[str, str], depth: int) -> str:
    def body(found: re.Match[str]) -> str:
        if found[0] not in types:
            return found[0]
        return _inlined(types[found[0]], types, depth - 1) if depth else "opaque"

    return LOCAL.sub(body, text) if types else text


def type_bodies(text: str) -> dict[str, str]:
    """The structure types of a module, by name; each is written out, and one that holds itself holds `opaque`."""
    return {found[1]: found[2] for line in text.splitlines() if (found := _TYPE.match(line))}


def statements(text: str) -> Iterator[Statement]:
    """The globals, function heads and instructions of a module's text, in its order."""
    function = label = ""
    block = -1
    for line in _joined(text):
        if line.startswith("define "):
            found = GLOBAL.search(line)
            function, block, label = found[0] if found else "@", -1, ""
            yield Statement(_plain(re.sub(r"\s*\{$", "", line)), function)
        elif line.startswith("}"):
            function = ""
        elif not function:
            if line.startswith("@"):
                yield Statement(_plain(line))
        elif found := _LABEL.match(line):
            block, label = block + 1, f"%{found[1]}"
        elif line.strip() and not line.lstrip().startswith(("#dbg", ";")):
            block = max(block, 0)
            yield Statement(_plain(line), function, block, label)


def _bare(text: str) -> str:
    """Without metadata, numbers of attributes and comments."""
    return _METADATA.sub(lambda found: found["quoted"] or "", text)


def _plain(line: str) -> str:
    return re.sub(r"\s+", " ", _bare(line)).strip()


def _joined(text: str) -> Iterator[str]:
    """Lines, with those that go on over several (switch, invoke, landingpad) put together."""
    held = ""
    for line in text.splitlines():
        goes_on = held.startswith("  ") and (line.startswith("    ") or line == "  ]")
        if goes_on:
            held = f"{held} {line.strip()}"
            continue
        if held:
            yield held
        held = line
    if held:
        yield held
