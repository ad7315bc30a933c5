"""Figures of the published embedding, and the tasks on measured kernels, where their data are at hand."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from laconic.cli import main
from laconic.errors import BadInput, UnknownName
from laconic_code import analogies, archives, chart, coarsening, device_mapping, networks, selection
from laconic_code.embedding import UNKNOWN, Embedding
from laconic_code.graph import FlowGraph
from laconic_code.programs import bag, cross_predict, edge_bag, forest, mean_vectors
from tests.laconic_code.programs import ir

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
    np.testing.assert_allclose(bag(rows, 3).toarray(), np.log1p([[2, 1, 0], [0, 0, 1]]))
    found = mean_vectors(rows, np.array([[2, 0], [0, 3], [1, 0]], dtype=np.float32))
    np.testing.assert_allclose(found, [[2 / 3, 1 / 3, np.log(3)], [1, 0, 0]], rtol=1e-6)


def test_a_row_is_predicted_from_other_folds_only() -> None:
    features, labels = np.arange(8.0)[:, None], np.array([0, 0, 0, 0, 1, 1, 1, 1])
    assert cross_predict(features, labels, labels, lambda: forest(0, 5)).tolist() == [1, 1, 1, 1, 0, 0, 0, 0]


def test_an_unknown_platform_is_named() -> None:
    with pytest.raises(UnknownName, match="valid ones: amd, nvidia"):
        device_mapping.run(["intel"])
    with pytest.raises(UnknownName, match="valid ones: grouped, paper"):
        device_mapping.run(kinds=["group"])
    with pytest.raises(UnknownName, match="Cypress"):
        coarsening.run(["intel"])


def test_factors_that_were_not_measured_fall_to_the_next() -> None:
    assert coarsening._measured(32, {1: 4.0, 2: 2.0, 4: 1.0}) == 4
    assert coarsening._gains({1: 4.0, 2: 2.0, 4: 1.0}) == [1, 2, 4, 4, 4, 4]


def test_a_kernel_takes_no_part_in_its_own_prediction() -> None:
    """Kernels of two sorts, each with a best factor of its own, that features tell apart."""
    features = np.array([[0.0], [0.1], [0.2], [5.0], [5.1], [5.2]])
    gains = np.ones((1, 6, 3))
    gains[0, :3, 1], gains[0, 3:, 2] = 2, 2
    assert coarsening.leave_one_out(features, gains, coarsening.RULES)[0].tolist() == [1, 1, 1, 2, 2, 2]
    gains[0, 0] = [1, 1, 9]  # its own gains change nothing of what is said of it
    assert coarsening.leave_one_out(features, gains, coarsening.RULES)[0, 0] == 1
    constant = coarsening.leave_one_out(features, gains, [coarsening.CoarseningRule(16, 0.0, False)])
    assert constant[0, 1:].tolist() == [2] * 5


def test_a_cautious_choice_needs_more_than_chance() -> None:
    """For two other kernels the nearest one knows a better factor, for a third it knows a worse one."""
    features = np.array([[0.0], [0.1], [0.2], [0.5], [5.0], [5.1], [5.2], [5.3], [5.4]])
    gains = np.tile([1, 1.5, 1.0], (1, 9, 1))
    gains[0, :3, 2], gains[0, 3, 2] = 1.6, 1.4
    assert coarsening.leave_one_out(features, gains, coarsening.RULES)[0, :3].tolist() == [2] * 3
    cautious = coarsening.leave_one_out(features, gains, coarsening.RULES, is_cautious=True)
    assert cautious[0, :3].tolist() == [1] * 3


def test_a_forest_is_chosen_within_the_training_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is scored for a fold are rows of the other folds alone."""
    seen: list[set[int]] = []
    scored = selection._score

    def spy(*given: Any) -> float:
        seen.append(set(given[4].tolist()))
        return scored(*given)

    monkeypatch.setattr(selection, "_score", spy)
    labels, folds = np.tile([0, 1], 15), np.repeat([0, 1, 2], 10)
    features = labels[:, None] + np.random.default_rng(0).normal(0, 0.1, (30, 2))
    found = selection.cross_predict(features, labels, np.ones((30, 2)), folds, 0, 5)
    assert np.array_equal(found, labels)
    assert seen == [set(np.flatnonzero(folds != fold).tolist()) for fold in range(3) for _ in selection.KINDS]


def test_kernels_that_were_read_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("llvmlite")
    monkeypatch.setattr(archives, "kernels", lambda task: {"one": ir("sum", 1, 2), "two": "define i32 @f( {"})
    with pytest.raises(BadInput, match="two has no function"):
        device_mapping.read_kernels("any", lambda line: None, tmp_path)
    monkeypatch.setattr(archives, "kernels", lambda task: {"one": ir("sum", 1, 2)})
    monkeypatch.setattr(device_mapping, "read_text", None)  # is not needed again
    found, unread = device_mapping.read_kernels("any", lambda line: None, tmp_path)
    assert (found["one"].abstracted[1], unread) == ("<%ID> = add nsw i32 <%ID>, <INT>", 0)


def test_edges_are_counted_by_what_they_join() -> None:
    edges = ([[0, 1, 0], [1, 0, 1]], [[0, 1, 0]])
    graphs = [FlowGraph((), ("a", "b"), np.array(each)) for each in edges]
    rows = [np.array([0, 1])] * 2
    np.testing.assert_allclose(edge_bag(rows, graphs, 2).toarray(), np.log1p([[1], [1]]))


def test_random_vectors_are_asked_beside_those_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    vectors = np.array([[1, 0], [1, 0.1], [0, 1], [0.9, 2]], dtype=np.float32)
    vocabulary = {"ret void": 0, "ret i32 <%ID>": 1, "br label <%ID>": 2, UNKNOWN: 3}
    path = Embedding(vocabulary, vectors).save(tmp_path / "x.safetensors")
    with pytest.raises(SystemExit):
        main(["code", "analogies", str(path), "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["distances"][0]["percent"] == 75
    assert 0 <= found["distances"][0]["random"] <= 100
    assert {row["random"] for row in found["analogies"]} == {0}


def test_questions_of_a_file(tmp_path: Path) -> None:
    vectors = np.array([[1, 0, 0], [1, 1, 0], [0, 0, 1], [0, 1, 1], *-np.eye(3), *-np.ones((6, 3))], dtype="f4")
    vocabulary = {name: n for n, name in enumerate([*"abxy", *map(str, range(len(vectors) - 5)), UNKNOWN])}
    (tmp_path / "q").write_text("# letters: 2\n\na\nb\nx\ny\n\na\nb\nx\nnothing\n")
    (row,) = analogies.asked_from(tmp_path / "q", Embedding(vocabulary, vectors))
    assert (row["part"], row["correct"], row["questions"], row["unknown"]) == ("letters", 1, 1, 1)
    (tmp_path / "q").write_text("a\nb\nx\n")
    with pytest.raises(BadInput, match="a question has four"):
        analogies.asked_from(tmp_path / "q", Embedding(vocabulary, vectors))


def test_the_map_is_a_page_with_every_statement_and_its_nearest() -> None:
    names = [f"<%ID> = {op} i32 <%ID>, <%ID>" for op in ("add", "sub", "mul", "and")] + ["ret void", "br label <%ID>"]
    vectors = np.random.default_rng(0).standard_normal((7, 4)).astype(np.float32)
    made = chart.page(Embedding({name: n for n, name in enumerate([*names, UNKNOWN])}, vectors), "a <name>")
    assert len(re.findall(r'<a href="#n\d+"', made)) == 6
    assert made.count('class="near"') == 6
    assert "a &lt;name&gt;" in made
    assert "http" not in made.replace("http-equiv", "")
    assert [chart.kind(name) for name in names[3:]] == ["integers", "control", "control"]
    with pytest.raises(BadInput, match="five statements"):
        chart.page(Embedding({"a": 0, UNKNOWN: 1}, vectors[:2]), "x")


@pytest.mark.parametrize("network", list(networks.NETWORKS))
def test_networks_learn_from_the_other_folds(network: str) -> None:
    """Programs of two classes with the same statements; order and edges tell them apart."""
    random = np.random.default_rng(0)
    labels = np.tile([0, 1], 20)
    rows = [np.array([0, 1, 2, 0] if label else [2, 1, 0, 0], dtype=np.int32) for label in labels]
    edges = [np.array([[0, 1, 0], [1, 2, 0], [2, 3, 1]])] * 40
    programs = networks.ProgramSet(rows, edges, np.arange(40), random.random((40, 2)).astype(np.float32))
    vectors = random.standard_normal((3, 8)).astype(np.float32)
    how = networks.Fitting(epochs=25, batch=8, width=8, rounds=1, rate=0.02)
    told: list[tuple[int, int]] = []
    given = (network, programs, labels, np.arange(40) // 2 % 2, vectors, how)
    found = networks.cross_predict(*given, lambda done, total: told.append((done, total)))
    assert (found == labels).mean() > 0.9
    assert told[-1] == (50, 50)
    assert np.array_equal(found, networks.cross_predict(*given)), "the same by the same seed"


def test_a_row_is_what_its_program_is_not_what_stands_beside_it() -> None:
    """A graph network's answer for a program does not change with the others of its batch."""
    how = networks.Fitting(width=4)
    vectors = np.random.default_rng(0).standard_normal((5, 4)).astype(np.float32)
    rows = [np.array([0, 1, 2], dtype=np.int32), np.array([3, 4], dtype=np.int32), np.array([4] * 7, dtype=np.int32)]
    edges = [np.array([[0, 1, 0], [1, 2, 1]]), np.array([[0, 1, 0]]), np.zeros((0, 3), dtype=np.int64)]
    for name in networks.NETWORKS:
        torch.manual_seed(0)
        model = networks.Classifier(name, vectors, 0, 3, how).eval()
        together = model(rows, edges, torch.arange(3), None)
        alone = [model([row], [edge], torch.arange(1), None)[0] for row, edge in zip(rows, edges, strict=True)]
        torch.testing.assert_close(together, torch.stack(alone), rtol=1e-5, atol=1e-6)


def test_bad_networks_are_named() -> None:
    with pytest.raises(BadInput, match="epochs is 1 or more"):
        networks.Fitting(epochs=0)
    empty = networks.ProgramSet([], [], np.array([]))
    with pytest.raises(UnknownName, match="graph network, recurrent network"):
        networks.cross_predict("none", empty, np.array([0]), np.array([0]), np.eye(2))


@needs_data
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_device_mapping_beats_the_published_accuracy() -> None:
    pytest.importorskip("llvmlite")
    rows = {(r["method"], r["folds"]): r for r in device_mapping.run(["amd"], trees=50)}
    assert rows["embedding + auxiliary", "paper"]["accuracy"] > 0.8279
    assert rows["embedding + auxiliary", "paper"]["oracle_speedup"] == pytest.approx(3.64, abs=0.01)
