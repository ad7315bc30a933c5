"""Abstraction: names and literals go, everything else stays."""

from __future__ import annotations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as some

from laconic_code.statements import abstract, statements, type_bodies

CASES = [
    ("%3 = add nsw i32 %2, 7", "<%ID> = add nsw i32 <%ID>, <INT>"),
    ("%3 = add i32 %2, -7", "<%ID> = add i32 <%ID>, <INT>"),
    ("store float 2.500000e+00, ptr %6, align 4, !tbaa !9", "store float <FLOAT>, ptr <%ID>, align 4"),
    ("%5 = fmul double %4, 0x3FB999999999999A", "<%ID> = fmul double <%ID>, <FLOAT>"),
    ("%4 = tail call i64 @_Z13get_global_idj(i32 0) #2", "<%ID> = tail call i64 <@ID>(i32 <INT>)"),
    ('@.s = private constant [4 x i8] c"hi;\\00", align 1', "<@ID> = private constant [4 x i8]  <STRING>, align 1"),
    ("%7 = extractelement <4 x float> %6, i32 2", "<%ID> = extractelement <4 x float> <%ID>, <TYP> 2"),
    ("%7 = insertelement <2 x i64> undef, i64 %6, i32 0",
     "<%ID> = insertelement <2 x i64> undef, <TYP> <%ID>, <TYP> 0"),
    ("%7 = extractvalue { i32, i32 } %6, 1", "<%ID> = extractvalue { i32, i32 } <%ID>, 1"),
    ("%9 = phi i64 [ 0, %4 ], [ %22, %20 ]", "<%ID> = phi i64 [ 0, <%ID> ], [ <%ID>, <%ID> ]"),
    ("%1 = getelementptr [5 x %pair], ptr %0, i64 0, i64 %2",
     "<%ID> = getelementptr [5 x { i32, { i32, float } }], ptr <%ID>, i64 <INT>, i64 <%ID>"),
    ("%1 = load i32, ptr addrspace(3) %0, align 4", "<%ID> = load i32, ptr addrspace(3) <%ID>, align 4"),
    ("call void @f(ptr nonnull align 16 dereferenceable(80) %4)",
     "call void <@ID>(ptr nonnull align 16 dereferenceable(80) <%ID>)"),
]  # fmt: skip
TYPES = {"%pair": "{ i32, %inner }", "%inner": "{ i32, float }", "%list": "{ i32, %list* }"}


@pytest.mark.parametrize(("text", "wanted"), CASES)
def test_abstraction(text: str, wanted: str) -> None:
    assert abstract(text, TYPES) == wanted


@pytest.mark.parametrize("text", [text for text, _ in CASES])
def test_what_is_abstract_stays_as_it_is(text: str) -> None:
    once = abstract(text, TYPES)
    assert abstract(once) == once


NAMES = some.from_regex(r'[a-zA-Z$._][-a-zA-Z$._0-9]{0,8}|[0-9]{1,4}|"[ a-z;!#,]{1,6}"', fullmatch=True)


@settings(max_examples=100)
@given(NAMES, NAMES, some.integers(-(2**63), 2**63 - 1), NAMES)
@example("A", '";"', 0, '"c"')
def test_names_and_numbers_make_no_difference(result: str, operand: str, literal: int, called: str) -> None:
    """The round trip: an abstract statement whose places are filled with anything gives the same one back."""
    for text in ("<%ID> = add nsw i64 <%ID>, <INT>", "<%ID> = call fast double <@ID>(i64 <INT>, double <%ID>)"):
        filled = text.replace("<%ID>", f"%{result}", 1).replace("<%ID>", f"%{operand}")
        assert abstract(filled.replace("<INT>", str(literal)).replace("<@ID>", f"@{called}")) == text


def test_a_type_that_holds_itself_ends() -> None:
    found = abstract("%1 = alloca %list", TYPES)
    assert found.startswith("<%ID> = alloca { i32, { i32, { i32, ")
    assert found.count("opaque") == 1


def test_statements_on_several_lines_are_one() -> None:
    text = """
%t = type { i32 }
define void @f(i32 %x) {
  switch i32 %x, label %a [
    i32 0, label %a
    i32 1, label %b
  ]
a:                          ; preds = %0
  invoke void @g()
          to label %b unwind label %c
b:
  ret void
c:
  %p = landingpad { ptr, i32 }
          cleanup
          catch ptr null
  resume { ptr, i32 } %p
}
declare void @g()
"""
    found = list(statements(text))
    assert [each.operation for each in found] == ["define", "switch", "invoke", "ret", "landingpad", "resume"]
    assert [each.block for each in found] == [-1, 0, 1, 2, 3, 3]
    assert found[2].text == "invoke void @g() to label %b unwind label %c"
    assert type_bodies(text) == {"%t": "{ i32 }"}
