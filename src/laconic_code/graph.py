"""The contextual flow graph of a module: its statements, joined by data flow, control flow and calls.

Callers: `embedding.py` takes pairs of neighbours from it, `drawing.py` draws it, `networks.py` learns from it.

    data     from the statement that defines a value (a phi's values too) to each that uses it; a parameter is defined
             by its function's head, a global by its own statement
    control  from a block's last statement to those of the next blocks that have no data from within their block, and
             from those of a block that nothing in it uses to its last statement
    call     from a call to the head of a function of the same module, and from its returns back to the call

So every statement of a function hangs together, and a loop is a cycle. Source: Neural Code Comprehension, NeurIPS 2018,
§4.2. Differs: statements are the nodes here and values the edges; in the paper it is the other way round, and its
embedding is trained on the dual.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from laconic.errors import BadInput
from laconic_code import ir
from laconic_code.statements import GLOBAL, LOCAL, Statement, abstract, statements, type_bodies

KINDS = ("data", "control", "call")
DATA, CONTROL, CALL = range(3)
_TARGET = re.compile(rf"label ({LOCAL.pattern})")
_CALLS = ("call", "invoke", "callbr")
_ENDS = ("br", "switch", "ret", "invoke", "unreachable", "resume", "indirectbr", "callbr", "catchswitch", "catchret",
         "cleanupret")  # fmt: skip


@dataclass(frozen=True)
class FlowGraph:
    """Statements and the edges between them.

    Args:
        statements: as LLVM prints them, with their places; none in a graph that was kept in a cache.
        abstracted: the same without names and literals.
        edges: rows of from, to and kind (a number in KINDS), each once, in order.
    """

    statements: tuple[Statement, ...]
    abstracted: tuple[str, ...]
    edges: np.ndarray[Any, np.dtype[np.signedinteger[Any]]]

    def __len__(self) -> int:
        return len(self.abstracted)


def read(path: str | Path) -> FlowGraph:
    """The flow graph of a C, C++, OpenCL, .ll or .bc file.

    Raises:
        BadInput: it cannot be read, or has no function with a body.
    """
    return build(ir.read_ir(path), str(path))


def build(text: str, name: str = "the module") -> FlowGraph:
    """The flow graph of IR text.

    Raises:
        BadInput: it has no function with a body.
    """
    found = tuple(statements(text))
    if not any(each.block >= 0 for each in found):
        raise BadInput(f"{name} has no function with a body, so its graph is empty")
    types = type_bodies(text)
    edges: set[tuple[int, int, int]] = set()
    functions: dict[str, list[int]] = defaultdict(list)
    for number, each in enumerate(found):
        functions[each.function].append(number)
    globals_ = {found[n].defines: n for n in functions.pop("", [])} | {f: n[0] for f, n in functions.items()}
    for members in functions.values():
        edges |= _data(found, members) | _control(found, members)
    edges |= _between(found, globals_, functions)
    rows = np.array(sorted(edges), dtype=np.int64).reshape(-1, 3)
    return FlowGraph(found, tuple(abstract(each.text, types) for each in found), rows)


def _data(found: Sequence[Statement], members: Sequence[int]) -> set[tuple[int, int, int]]:
    """Edges from definitions to uses within a function, whose head is its first member."""
    head = members[0]
    definitions = {found[n].defines: n for n in members[1:] if found[n].defines}
    labels = {found[n].label for n in members}
    parameters = set(LOCAL.findall(found[head].text))
    edges = set()
    for number in members[1:]:
        for use in _uses(found[number]):
            if use in definitions:
                edges.add((definitions[use], number, DATA))
            elif use in parameters and use not in labels:
                edges.add((head, number, DATA))
    return edges


def _uses(statement: Statement) -> set[str]:
    """The local names that a statement reads; labels of branches are left out, those of a phi too."""
    text = _TARGET.sub("", statement.text)
    if statement.defines:
        text = text.split(" = ", 1)[1]
    if text.startswith("phi "):
        text = re.sub(rf", {LOCAL.pattern} \]", "]", text)
    return set(LOCAL.findall(text))


def _control(found: Sequence[Statement], members: Sequence[int]) -> set[tuple[int, int, int]]:
    head, body = members[0], members[1:]
    blocks: dict[int, list[int]] = defaultdict(list)
    for number in body:
        blocks[found[number].block].append(number)
    starts: dict[int, list[int]] = {}
    by_label = {found[numbers[0]].label: block for block, numbers in blocks.items()}
    edges = set()
    for block, numbers in blocks.items():
        within = {found[n].defines: n for n in numbers if found[n].defines}
        used, starts[block] = set(), []
        for number in numbers:
            sources = {within[use] for use in _uses(found[number]) if use in within and within[use] < number}
            used |= sources
            if not sources:
                starts[block].append(number)
        last = numbers[-1]
        edges |= {(number, last, CONTROL) for number in numbers[:-1] if number not in used}
    edges |= {(head, start, CONTROL) for start in starts.get(0, [])}
    for numbers in blocks.values():
        for target in _TARGET.findall(found[numbers[-1]].text):
            # The entry block may have no label of its own; nothing branches to it.
            edges |= {(numbers[-1], start, CONTROL) for start in starts[by_label[target]]}
    return edges


def _between(
    found: Sequence[Statement], globals_: dict[str | None, int], functions: dict[str, list[int]]
) -> set[tuple[int, int, int]]:
    """Edges from globals to what names them, between calls and the functions called."""
    edges = set()
    for number, each in enumerate(found):
        text = each.text.split(" = ", 1)[1] if each.text.startswith("@") else each.text
        for name in GLOBAL.findall(text):
            target = globals_.get(name)
            if target is None or target == number:
                continue
            if name in functions and each.operation in _CALLS and re.search(rf"{re.escape(name)}\(", text):
                edges.add((number, target, CALL))
                returns = (n for n in functions[name] if found[n].operation == "ret")
                edges |= {(end, number, CALL) for end in returns}
            else:
                edges.add((target, number, DATA))
    return edges
