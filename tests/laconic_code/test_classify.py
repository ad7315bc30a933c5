"""A stranger's folder: programs of three kinds, from nothing to a report in one command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from laconic.cli import main
from laconic.errors import BadInput, UnknownName
from laconic.storage.memo import Memo
from laconic_code import classify
from laconic_code import ir as ir_module
from laconic_code.array_memo import ARRAY
from laconic_code.ir import find
from tests.laconic_code.programs import KINDS, ir

pytest.importorskip("llvmlite")


def _folder(root: Path, programs: int, compiled: bool) -> Path:
    for kind in KINDS:
        (root / kind).mkdir(parents=True)
        for n in range(programs):
            name, text = (f"{n}.c", KINDS[kind].format(n, n % 3 + 2)) if compiled else (f"{n}.ll", ir(kind, n, n + 2))
            (root / kind / name).write_text(text)
    return root


@pytest.mark.parametrize("compiled", [False, True])
def test_a_folder_becomes_a_report(compiled: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if compiled and find("clang") is None:
        pytest.skip("no clang, which compiles sources")
    folder = _folder(tmp_path / "programs", 4, compiled)
    (folder / "sum" / ("broken.c" if compiled else "broken.ll")).write_text("int f( {")
    with pytest.raises(SystemExit) as ended:
        main(["code", "classify", str(folder), "--folds", "2", "--trees", "20", "--networks", "2", "--json"])
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert record["classes"] == sorted(KINDS)
    assert (record["programs"], len(record["skipped"])) == (12, 1)
    controls = {"embedding", "random embedding", "bag of statements", "bag of statements and edges",
                "raw counts with a forest", *(f"{network}, {way}" for network in ("recurrent network", "graph network")
                                              for way in ("embedding", "random embedding"))}  # fmt: skip
    rows = {row["method"]: row for row in record["results"]}
    assert controls <= rows.keys() <= set(classify.METHODS)
    for way in ("embedding", "bag of statements", classify.METHOD):
        assert rows[way]["accuracy"] > 0.8, way
    assert rows["embedding"]["unknown_share"] < 0.5
    assert np.sum(record["confusion"], axis=1).tolist() == [4, 4, 4]


def test_the_report_is_a_table_with_a_confusion_matrix(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["code", "classify", str(_folder(tmp_path / "p", 3, False)), "--folds", "3", "--trees", "5"])
    said = capsys.readouterr().out
    assert "9 programs, 0 skipped" in said
    assert "sort\tsum\ttext" in said


def test_bad_folders_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no folder"):
        classify.run(tmp_path / "nothing")
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "x.ll").write_text(ir("sum", 1, 2))
    with pytest.raises(BadInput, match="two or more"):
        classify.run(tmp_path)
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "x.ll").write_text(ir("text", 1, 2))
    with pytest.raises(BadInput, match="class a has 1 programs that can be read, and 5 folds need as many"):
        classify.run(tmp_path)


def test_an_unknown_method_is_named_before_anything_is_read() -> None:
    with pytest.raises(UnknownName, match="did you mean 'bag of statements'"):
        classify.ClassificationSpec(methods=("bag of statement",))


def test_folds_divide_every_class_alike() -> None:
    labels = np.repeat(np.arange(3), (5, 10, 15))
    folds = classify.divided(labels, 5, 0)
    assert [np.bincount(folds[labels == k]).tolist() for k in range(3)] == [[1] * 5, [2] * 5, [3] * 5]
    found = classify.accuracy(np.ones(30, dtype=bool), folds)
    assert found == {"accuracy": 1.0, "interval": [1.0, 1.0]}


def test_a_prelude_stands_before_every_source(tmp_path: Path) -> None:
    if find("clang") is None:
        pytest.skip("no clang, which compiles sources")
    for kind, body in {"up": "twice(x) + 1", "down": "twice(x) ^ 5"}.items():
        (tmp_path / "p" / kind).mkdir(parents=True)
        for n in range(2):
            (tmp_path / "p" / kind / f"{n}.cpp").write_text(f"int f(int x) {{ return {body} + {n}; }}")
    (tmp_path / "prelude.h").write_text("inline int twice(int x) { return x * 2; }")
    dialect = ir_module.Dialect(tmp_path / "prelude.h", "gnu++98")
    how = classify.ClassificationSpec(folds=2, trees=5, cache=tmp_path / "cache", dialect=dialect)
    record = classify.run(tmp_path / "p", how)
    assert (record["programs"], record["skipped"]) == (4, [])
    assert record == classify.run(tmp_path / "p", how), "what is kept gives the same"
    (tmp_path / "prelude.h").write_text("int (")
    dialect = ir_module.Dialect(tmp_path / "prelude.h", "gnu++11")
    with pytest.raises(BadInput, match=r"the prelude .* does not compile"):
        classify.run(tmp_path / "p", classify.ClassificationSpec(2, dialect=dialect))


def test_bad_dialects_are_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="is no file"):
        ir_module.Dialect(tmp_path / "nothing.h")
    with pytest.raises(BadInput, match="a word such as"):
        ir_module.Dialect(standard="c++98 -o /x")


def test_predictions_are_kept_once_they_are_made(tmp_path: Path) -> None:
    made = []

    def make() -> np.ndarray:
        made.append(1)
        return np.arange(3)

    for settings in ("a", "a", "b"):
        assert Memo(tmp_path, settings).recall("way", make, ARRAY).tolist() == [0, 1, 2]
    assert len(made) == 2
    for path in tmp_path.iterdir():
        path.write_bytes(b"damaged")
    assert Memo(tmp_path, "a").recall("way", make, ARRAY).tolist() == [0, 1, 2]
    assert len(made) == 3


def test_twins_are_programs_with_the_same_statements_in_other_folds() -> None:
    rows = [np.array(row, dtype=np.int32) for row in ([1, 2], [1, 2], [2, 1], [3], [3])]
    assert classify.twins(rows, np.array([0, 1, 0, 0, 0])) == 0.4
