"""Laws of the flow graph, against the operands that LLVM itself gives."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from laconic.errors import BadInput
from laconic_code import ir
from laconic_code.drawing import draw
from laconic_code.graph import CALL, CONTROL, DATA, FlowGraph, build
from tests.laconic_code.programs import LOOP, MODERN

binding = pytest.importorskip("llvmlite.binding")
OPERATIONS = ("add", "sub", "mul", "and", "or", "xor", "shl")


@some.composite
def modules(draw_: some.DrawFn) -> str:
    """A function of several blocks, each of which uses values of itself, of the entry, and of a phi."""
    lines = ["define i64 @f(i64 %a, i64 %b) {", "b0:"]
    values = ["%a", "%b"]
    blocks = draw_(some.integers(1, 4))
    for block in range(blocks):
        mine = list(values)
        if block:
            lines.append(f"b{block}:")
            lines.append(f"  %p{block} = phi i64 [ {draw_(some.sampled_from(values))}, %b0 ]")
            mine.append(f"%p{block}")
        for number in range(draw_(some.integers(0, 5))):
            name, operation = f"%v{block}.{number}", draw_(some.sampled_from(OPERATIONS))
            left = draw_(some.sampled_from(mine))
            right = draw_(some.sampled_from([*mine, "7", "-1"]))
            lines.append(f"  {name} = {operation} i64 {left}, {right}")
            mine.append(name)
        if block:
            lines.append(f"  ret i64 {mine[-1]}")
        else:
            values = mine
            targets = " ".join(f"i64 {n}, label %b{n}" for n in range(2, blocks))
            lines.append(f"  switch i64 %a, label %b1 [ {targets} ]" if blocks > 1 else f"  ret i64 {mine[-1]}")
    return ir.read_text("\n".join([*lines, "}"]))


def operand_edges(text: str) -> set[tuple[str, str]]:
    """Definition and use of every value, as LLVM's own operands have it."""
    found = set()
    for function in binding.parse_assembly(text).functions:
        for block in function.blocks:
            for instruction in block.instructions:
                for operand in instruction.operands:
                    if operand.value_kind == binding.ValueKind.instruction:
                        found.add((str(operand).split(" = ")[0].strip(), str(instruction).split("\n")[0].strip()))
    return found


def data_edges(graph: FlowGraph) -> set[tuple[str | None, str]]:
    texts = [each.text for each in graph.statements]
    rows = graph.edges[graph.edges[:, 2] == DATA].tolist()
    return {(graph.statements[a].defines, texts[b]) for a, b, _ in rows if graph.statements[a].block >= 0}


@settings(max_examples=40)
@given(modules())
def test_every_use_has_an_edge_from_its_definition_and_no_other(text: str) -> None:
    plain = {(a, b) for a, b in operand_edges(text) if not b.startswith("switch")}
    ours = {(a, b) for a, b in data_edges(build(text)) if not b.startswith("switch")}
    assert ours == plain


@settings(max_examples=30)
@given(modules())
def test_a_function_hangs_together(text: str) -> None:
    graph = build(text)
    reached, before = {0}, 0
    while len(reached) > before:
        before = len(reached)
        reached |= {b for a, b, _ in graph.edges.tolist() if a in reached}
    assert reached == set(range(len(graph))), "every statement can be reached from the head"


@pytest.fixture
def graph() -> FlowGraph:
    return build(ir.read_text(MODERN))


def number(graph: FlowGraph, start: str) -> int:
    (found,) = (n for n, each in enumerate(graph.statements) if each.text.startswith(start))
    return found


def edges(graph: FlowGraph) -> set[tuple[int, int, int]]:
    return {(a, b, k) for a, b, k in graph.edges.tolist()}


def test_phi_takes_its_values_and_not_its_labels(graph: FlowGraph) -> None:
    into = {a for a, b, k in edges(graph) if b == number(graph, "%i = phi") and k == DATA}
    assert into == {number(graph, "%next =")}
    ends = {a for a, b, k in edges(graph) if b == number(graph, "%result = phi") and k == DATA}
    assert ends == {number(graph, "%total ="), number(graph, "%added =")}


def test_loops_and_switches_are_control_flow(graph: FlowGraph) -> None:
    back = number(graph, "br i1 %again")
    assert (back, number(graph, "%i = phi"), CONTROL) in edges(graph)
    assert (number(graph, "switch"), number(graph, "%result = phi"), CONTROL) in edges(graph)


def test_calls_go_there_and_back(graph: FlowGraph) -> None:
    call = number(graph, "%doubled =")
    assert (call, number(graph, "define internal i32 @twice"), CALL) in edges(graph)
    assert (number(graph, "ret i32 %y"), call, CALL) in edges(graph)


def test_parameters_come_from_the_head(graph: FlowGraph) -> None:
    assert (number(graph, "define i32 @sum"), number(graph, "%some ="), DATA) in edges(graph)


def test_edges_are_ordered_and_unique(graph: FlowGraph) -> None:
    assert np.array_equal(graph.edges, np.unique(graph.edges, axis=0))


def test_a_module_without_functions_is_refused() -> None:
    with pytest.raises(BadInput, match="no function with a body"):
        build("@x = global i32 3")


@pytest.mark.skipif(ir.find("llvm-as") is None, reason="no llvm-as, which reads IR of older versions")
def test_old_ir_gives_the_same_graph_as_todays() -> None:
    try:
        old = build(ir.read_text(LOOP))
    except BadInput as error:
        pytest.skip(f"this llvm-as is too new for pointers with types: {error}")
    new = build(ir.read_text(MODERN))
    assert old.abstracted == new.abstracted
    assert np.array_equal(old.edges, new.edges)


def test_drawing_has_every_statement_and_every_edge(graph: FlowGraph) -> None:
    root = ElementTree.fromstring(draw(graph, "a <name>"))
    space = "{http://www.w3.org/2000/svg}"
    assert len(root.findall(f"{space}text")) == len(graph) + 3
    assert len([path for path in root.findall(f"{space}path") if path.get("class")]) == len(graph.edges)
    assert re.search("<%ID> = phi", "".join(root.itertext()))
