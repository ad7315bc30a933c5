"""Figures of the published embedding, and the tasks on measured kernels, where their data are at hand."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from laconic.comprehension import analogies, archives, coarsening, device_mapping
from laconic.comprehension.embedding import UNKNOWN, Embedding
from laconic.comprehension.programs import bag, cross_predict, mean_vectors
from laconic.errors import BadInput, UnknownName

FOLDER = Path(os.environ.get("LACONIC_DATA") or "data") / "code"
needs_data = pytest.mark.skipif(not (FOLDER / "cgo17.tar.xz").is_file(), reason="LACONIC_DATA has no folder code/")
BY_HAND = {"bitcast and back", "trunc and ext", "pointer to integer and back", "sum and difference, integers"}


@needs_data
def test_published_embedding_gives_published_scores() -> None:
    published = archives.published()
    for row in analogies.analogies(published):
        if row["part"] not in BY_HAND:  # of which the paper lists its own selection
            assert [row["correct"], row["questions"]] == row["published"], row
    for row in analogies.distances(published):
        assert row["percent"] == pytest.approx(row["published"], abs=0.006)


def test_an_analogy_is_answered_where_vectors_add_up() -> None:
    names = [f"<%ID> = {op} {t} <%ID>, <%ID>" for op in ("fadd", "fsub") for t in ("float", "double")]
    vectors = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1], *np.eye(3) * -1, *np.ones((6, 3)) * -1], dtype="f4")
    vocabulary = {name: n for n, name in enumerate([*names, *map(str, range(len(vectors) - 5)), UNKNOWN])}
    rows = {row["part"]: row for row in analogies.analogies(Embedding(vocabulary, vectors))}
    assert (rows["float operations by type"]["correct"], rows["float operations by type"]["questions"]) == (1, 1)
    vectors[3] = -vectors[3]
    rows = {row["part"]: row for row in analogies.analogies(Embedding(vocabulary, vectors))}
    assert rows["float operations by type"]["correct"] == 0


def test_distances_count_triples() -> None:
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [0.9, 2]], dtype=np.float32)
    vocabulary = {"ret void": 0, "ret i32 <%ID>": 1, "br label <%ID>": 2, UNKNOWN: 3}
    (row,) = analogies.distances(Embedding(vocabulary, vectors))
    # 0·1 = 1 against 0 and 0.9: both nearer; 1·0 = 1 against 0.1 and 1.1: one of two.
    assert row["percent"] == 75


def test_a_missing_archive_names_the_cure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("LACONIC_DATA", str(tmp_path))
    archives.members.cache_clear()
    with pytest.raises(BadInput, match="set LACONIC_DATA"):
        archives.members("cgo17")


def test_programs_as_numbers() -> None:
    rows = [np.array([0, 0, 1]), np.array([2])]
    np.testing.assert_allclose(bag(rows, 3), np.log1p([[2, 1, 0], [0, 0, 1]]))
    found = mean_vectors(rows, np.array([[2, 0], [0, 3], [1, 0]], dtype=np.float32))
    np.testing.assert_allclose(found, [[2 / 3, 1 / 3, np.log(3)], [1, 0, 0]], rtol=1e-6)


def test_a_row_is_predicted_from_other_folds_only() -> None:
    features, labels = np.arange(8.0)[:, None], np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert cross_predict(features, labels, labels, 0, 5).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_an_unknown_platform_is_named() -> None:
    with pytest.raises(UnknownName, match="valid ones: amd, nvidia"):
        device_mapping.run(["intel"])
    with pytest.raises(UnknownName, match="Cypress"):
        coarsening.run(["intel"])


def test_factors_that_were_not_measured_fall_to_the_next() -> None:
    times = {"a": {1: 4.0, 2: 2.0, 4: 1.0}, "b": {1: 4.0, 2: 2.0, 4: 8.0}, "c": {1: 4.0, 2: 2.0, 4: 3.0}}
    assert coarsening._measured(32, times["a"]) == 4
    assert coarsening._constant(["a", "b", "c"], times) == [2, 4, 2]


@needs_data
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_device_mapping_beats_the_published_accuracy() -> None:
    pytest.importorskip("llvmlite")
    rows = {(r["method"], r["folds"]): r for r in device_mapping.run(["amd"], trees=50)}
    assert rows["embedding + auxiliary", "paper"]["accuracy"] > 0.8279
    assert rows["embedding + auxiliary", "paper"]["oracle_speedup"] == pytest.approx(3.64, abs=0.01)
