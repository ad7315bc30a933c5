"""A stranger's folder: programs of three kinds, from nothing to a report in one command."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from comprehension.programs import KINDS, ir
from laconic.cli import main
from laconic.comprehension import classify
from laconic.comprehension.ir import find
from laconic.errors import BadInput

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
        main(["code", "classify", str(folder), "--folds", "2", "--trees", "20", "--json"])
    assert ended.value.code == 0
    record = json.loads(capsys.readouterr().out)
    assert record["classes"] == sorted(KINDS)
    assert (record["programs"], len(record["skipped"])) == (12, 1)
    assert {row["method"] for row in record["results"]} == {"embedding", "random embedding", "bag of statements"}
    assert min(row["accuracy"] for row in record["results"]) > 0.8
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


def test_folds_divide_every_class_alike() -> None:
    labels = np.repeat(np.arange(3), (5, 10, 15))
    folds = classify.divided(labels, 5, 0)
    assert [np.bincount(folds[labels == k]).tolist() for k in range(3)] == [[1] * 5, [2] * 5, [3] * 5]
    found = classify.accuracy(np.ones(30, dtype=bool), folds)
    assert found == {"accuracy": 1.0, "interval": [1.0, 1.0]}
