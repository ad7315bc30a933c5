"""Reading of files: what can be read, and one sentence for what cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

from laconic.errors import BadInput
from laconic_code import corpus, ir
from laconic_code.graph import read
from tests.laconic_code.programs import KINDS, MODERN

binding = pytest.importorskip("llvmlite.binding")
needs_clang = pytest.mark.skipif(ir.find("clang") is None, reason="no clang, which compiles sources")


def test_text_and_bitcode_give_the_same(tmp_path: Path) -> None:
    (tmp_path / "a.ll").write_text(MODERN)
    (tmp_path / "a.bc").write_bytes(binding.parse_assembly(MODERN).as_bitcode())
    assert read(tmp_path / "a.ll").abstracted == read(tmp_path / "a.bc").abstracted


@needs_clang
def test_c_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text(KINDS["sort"].format(0, 1))
    assert any(" = fmul float" in each for each in read(tmp_path / "a.c").abstracted)


@needs_clang
def test_opencl_is_compiled(tmp_path: Path) -> None:
    (tmp_path / "a.cl").write_text("kernel void f(global float* a) { a[get_global_id(0)] *= 2.0f; }")
    assert any(" = fmul float" in each for each in read(tmp_path / "a.cl").abstracted)


@needs_clang
def test_source_that_does_not_compile_says_where(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int f( {")
    with pytest.raises(BadInput, match=r"a\.c does not compile: .*expected"):
        read(tmp_path / "a.c")


@needs_clang
def test_a_compilation_ends_by_its_deadline(tmp_path: Path) -> None:
    (tmp_path / "a.c").write_text("int f(void) { return 1; }")
    with pytest.raises(BadInput, match="was not done after"):
        ir.read_ir(tmp_path / "a.c", seconds=1e-4)


def test_no_clang_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.c").write_text("int x;")
    monkeypatch.setattr(ir, "find", lambda tool: None)
    with pytest.raises(BadInput, match="clang is not installed; install clang 14 or later"):
        read(tmp_path / "a.c")


def test_bitcode_on_which_llvm_gives_up_is_one_sentence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends its process, which is not ours."""
    (tmp_path / "a.bc").write_bytes(binding.parse_assembly(MODERN).as_bitcode())
    monkeypatch.setattr(ir, "_PRINT", "import os; os.abort()")
    with pytest.raises(BadInput, match=r"a\.bc is not bitcode that this LLVM reads: LLVM gave up"):
        read(tmp_path / "a.bc")


@needs_clang
def test_a_changed_header_is_noticed_by_what_is_kept(tmp_path: Path) -> None:
    """Headers of a source, and of a prelude."""
    cache, source, prelude = tmp_path / "cache", tmp_path / "a b.c", tmp_path / "prelude.h"
    headers = [tmp_path / "one $#.h", tmp_path / "two.h"]
    source.write_text('#include "one $#.h"\nint f(int x) { return STEP(x) + TWICE(x); }')
    prelude.write_text('#include <limits.h>\n#include "two.h"\n')

    def found() -> tuple[str, ...]:
        ir._precompiled.cache_clear()  # a process compiles a prelude once
        return corpus.read_all([source], cache, dialect=ir.Dialect(prelude)).graphs[0].abstracted

    seen = []
    for first, second in (("x - y", "x | x"), ("x * x", "x | x"), ("x * x", "x ^ 5")):
        for header, name, body in zip(headers, ("STEP", "TWICE"), (first, second), strict=True):
            header.write_text(f"#define {name}(x) ({body.replace('y', '7')})")
        seen.append(found())
        assert found() == seen[-1]
    assert len(set(seen)) == 3
    assert len(list(cache.rglob("*.graph"))) == 3, "what is unchanged is not made again"
    headers[0].unlink()
    with pytest.raises(BadInput, match="file not found"):
        found()


@pytest.mark.parametrize(
    ("name", "content", "says"),
    [
        ("a.ll", b"define i32 @f( {", "cannot be read|is not IR"),
        ("a.ll", b"\xff\xfe", "no IR text"),
        ("a.bc", b"BC nonsense", "is not bitcode"),
        ("a.ll", b"@x = global i32 1", "no function with a body"),
        ("a.py", b"pass", "expected a file that ends in"),
    ],
)
def test_damaged_files_are_one_sentence(name: str, content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(BadInput, match=says):
        read(tmp_path / name)
