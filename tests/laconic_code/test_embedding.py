"""Vectors of statements: the kernel against its slow twin, the file, pairs and workers that agree."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from laconic.errors import BadInput, PayloadError
from laconic.transports.base import Transport
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from laconic_code import embedding as embeddings
from laconic_code import embedding_job
from laconic_code.embedding import UNKNOWN, Embedding, context_pairs, hubs, vocabulary_of
from laconic_code.graph import FlowGraph, build
from laconic_code.skipgram import Training, ascend, negative_table, train
from reference import skipgram as twin
from tests.laconic_code.programs import MODERN, ir


def _case(seed: int, size: int, dim: int, count: int) -> tuple[np.ndarray, ...]:
    random = np.random.default_rng(seed)
    v, u = (random.standard_normal((size, dim)).astype(np.float32) for _ in range(2))
    return v, u, *(random.integers(0, size, (count, width)).astype(np.int32) for width in (2, 3))


@settings(max_examples=25)
@given(some.integers(0, 999), some.integers(1, 9), some.integers(1, 33), some.integers(0, 20))
def test_the_kernel_is_its_twin(seed: int, size: int, dim: int, count: int) -> None:
    v, u, pairs, negatives = _case(seed, size, dim, count)
    wanted = twin.ascend(v, u, pairs, negatives, 0.1, 1e-3)
    ascend(v, u, pairs, negatives, np.float32(0.1), np.float32(1e-3))
    np.testing.assert_allclose(v, wanted[0], rtol=1e-4, atol=1e-4)
    np.testing.assert_allclose(u, wanted[1], rtol=1e-4, atol=1e-4)


def test_a_step_follows_the_gradient_of_the_objective() -> None:
    v, u, pairs, negatives = (each.copy() for each in _case(3, 6, 5, 1))
    negatives[0] = [n for n in range(6) if n != pairs[0, 1]][:3]
    centre, context = pairs[0]
    numeric, epsilon = np.zeros(5), 1e-6
    for d in range(5):
        shifted = v.astype(np.float64)
        shifted[centre, d] += epsilon
        ahead = twin.objective(shifted, u.astype(np.float64), centre, context, list(negatives[0]))
        here = twin.objective(v.astype(np.float64), u.astype(np.float64), centre, context, list(negatives[0]))
        numeric[d] = (ahead - here) / epsilon
    before = v[centre].copy()
    ascend(v, u, pairs, negatives, np.float32(1e-3), np.float32(0))
    np.testing.assert_allclose((v[centre] - before) / 1e-3, numeric, rtol=2e-2, atol=2e-3)


def _clusters(count: int = 40_000) -> np.ndarray:
    """Pairs within 0…4 and within 5…9, never across."""
    random = np.random.default_rng(0)
    side = random.integers(0, 2, count) * 5
    return np.stack([side + random.integers(0, 5, count), side + random.integers(0, 5, count)], axis=1).astype(np.int32)


def _within_minus_across(vectors: np.ndarray) -> float:
    unit = embeddings.normalised(vectors)
    cosines = unit @ unit.T
    return float((cosines[:5, :5].mean() + cosines[5:, 5:].mean()) / 2 - cosines[:5, 5:].mean())


def test_what_stands_together_ends_together_and_is_reproducible() -> None:
    how = Training(dim=16, epochs=2, seed=7)
    vectors = train(_clusters(), 10, how)
    assert _within_minus_across(vectors) > 0.5
    assert np.array_equal(vectors, train(_clusters(), 10, how))
    assert not np.array_equal(vectors, train(_clusters(), 10, Training(dim=16, epochs=2, seed=8)))


def test_workers_end_with_the_same_good_vectors() -> None:
    how = Training(dim=16, epochs=2)
    found = run_threads(2, lambda transport: train(_clusters(), 10, how, World(transport)), timeout_s=60)
    assert np.array_equal(found[0], found[1])
    assert _within_minus_across(found[0]) > 0.5


def test_subsampling_keeps_what_is_learned() -> None:
    assert _within_minus_across(train(_clusters(), 10, Training(dim=16, epochs=4, threshold=0.05))) > 0.4


def test_negatives_follow_the_counts() -> None:
    table = negative_table(np.repeat(np.arange(3), (1, 16, 81)).astype(np.int32), 4)
    shares = np.bincount(table, minlength=4) / len(table)
    np.testing.assert_allclose(shares, np.array([1, 8, 27, 0]) / 36, atol=1e-4)


def test_pairs_are_those_within_the_distance() -> None:
    graph = build(MODERN)
    vocabulary = {text: n for n, text in enumerate([*dict.fromkeys(graph.abstracted), UNKNOWN])}
    size = len(graph)
    near = np.full((size, size), 99)
    np.fill_diagonal(near, 0)
    for a, b, _ in graph.edges.tolist():
        near[a, b] = near[b, a] = min(near[a, b], 1)
    for k in range(size):
        near = np.minimum(near, near[:, k : k + 1] + near[k : k + 1])
    for distance in (1, 2, 3):
        wanted = sorted((vocabulary[graph.abstracted[a]], vocabulary[graph.abstracted[b]])
                        for a in range(size) for b in range(size) if 0 < near[a, b] <= distance)  # fmt: skip
        assert sorted(map(tuple, context_pairs(graph, vocabulary, distance).tolist())) == wanted


def test_a_hub_leads_on_to_some_of_its_neighbours() -> None:
    """A value with 3,000 uses would be nine million pairs."""
    uses = 3_000
    edges = np.array([[0, use, 0] for use in range(1, uses + 1)])
    star = FlowGraph((), tuple(map(str, range(uses + 1))), edges)
    vocabulary = {name: n for n, name in enumerate([*star.abstracted, UNKNOWN])}
    pairs = context_pairs(star, vocabulary, fan_out=20)
    assert len(pairs) <= 2 * uses * (20 + 1)
    found = set(map(tuple, pairs.tolist()))
    assert len(found) == len(pairs)
    assert found == {(b, a) for a, b in found}
    assert {(0, use) for use in range(1, uses + 1)} <= found, "its own context is whole"
    assert np.array_equal(pairs, context_pairs(star, vocabulary, fan_out=20))
    assert not np.array_equal(pairs, context_pairs(star, vocabulary, fan_out=20, seed=1))
    assert (hubs(star, 20), hubs(star, uses)) == (1, 0)
    with pytest.raises(BadInput, match="fan-out is 1 or more"):
        context_pairs(star, vocabulary, fan_out=0)


def test_the_vocabulary_is_cut_off_and_ends_with_unknown() -> None:
    assert vocabulary_of([["a", "b", "a"], ["c", "b", "a"]], cutoff=2) == {"a": 0, "b": 1, UNKNOWN: 2}


@pytest.fixture
def small() -> Embedding:
    vectors = np.array([[1, 0], [0.9, 0.1], [0, 1]], dtype=np.float32)
    return Embedding({"a": 0, "b": 1, UNKNOWN: 2}, vectors, {"seed": 3})


def test_files_come_back_as_they_were(small: Embedding, tmp_path: Path) -> None:
    found = embeddings.load(small.save(tmp_path / "x.safetensors"))
    assert (found.vocabulary, found.about) == (small.vocabulary, small.about)
    assert np.array_equal(found.vectors, small.vectors)


def test_damaged_files_are_refused(small: Embedding, tmp_path: Path) -> None:
    path = small.save(tmp_path / "x.safetensors")
    whole = path.read_bytes()
    for damaged in (whole[:-3] + bytes([whole[-3] ^ 1]) + whole[-2:], whole[:-3], b"", b"nothing of the kind"):
        path.write_bytes(damaged)
        with pytest.raises(PayloadError, match=r"x\.safetensors"):
            embeddings.load(path)
    with pytest.raises(PayloadError, match="no whole vocabulary"):
        embeddings.load(tmp_path)
    (tmp_path / "vocabulary.json").write_text(f'{{"a": 0, "{UNKNOWN}": 1}}')
    place = tmp_path / "embeddings.npy"
    np.save(place, np.array([["text"], ["text"]]))
    texts = place.read_bytes()
    with place.open("wb") as file:
        np.savez(file, vectors=np.zeros((2, 3)))
    for damaged in (b"", texts, place.read_bytes()):
        place.write_bytes(damaged)
        with pytest.raises(PayloadError, match="no whole vocabulary"):
            embeddings.load(tmp_path)


def test_unknown_statements_are_counted(small: Embedding) -> None:
    assert small.rows(["b", "nothing"]).tolist() == [1, 2]
    assert small.unknown_share([["a", "x"], ["b", "y"]]) == 0.5
    assert small.nearest("a", 1)[0][0] == "b"
    with pytest.raises(BadInput, match="does not have"):
        small.nearest("x")


def test_from_files_to_a_file(tmp_path: Path) -> None:
    pytest.importorskip("llvmlite")
    for n in range(6):
        (tmp_path / f"{n}.ll").write_text(ir("sum" if n % 2 else "text", n, n + 1))
    (tmp_path / "bad.ll").write_text("nonsense")
    how = {"dim": 8, "epochs": 2, "cutoff": 1, "seed": 1}
    record = embedding_job.embed([str(tmp_path)], str(tmp_path / "e"), how, cache=str(tmp_path / "cache"))
    assert record["programs"] == 6
    assert [Path(path).name for path, _ in record["skipped"]] == ["bad.ll"]
    assert (record["unknown_share"], record["hubs"]) == (0, 0)
    first = embeddings.load(tmp_path / "e")
    embedding_job.embed([str(tmp_path)], str(tmp_path / "e2"), how, cache=str(tmp_path / "cache"))  # from what was kept
    assert np.array_equal(first.vectors, embeddings.load(tmp_path / "e2").vectors)


def test_any_safetensors_library_reads_the_file(small: Embedding, tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors")
    with safetensors.safe_open(small.save(tmp_path / "x.safetensors"), "numpy") as file:
        assert np.array_equal(file.get_tensor("vectors"), small.vectors)
        assert json.loads(file.metadata()["statements"]) == ["a", "b", UNKNOWN]


def test_an_interrupted_training_goes_on_and_ends_the_same(tmp_path: Path) -> None:
    how, pairs = Training(dim=8, epochs=3), _clusters(5_000)
    wanted = train(pairs, 10, how)

    def stop(done: int, total: int) -> None:
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(pairs, 10, how, progress=stop, folder=tmp_path)
    epochs: list[int] = []
    again = train(pairs, 10, how, progress=lambda done, total: epochs.append(done), folder=tmp_path)
    assert np.array_equal(again, wanted)
    assert min(epochs) > 5_000, "the first epoch is not trained again"


def test_workers_send_only_the_rows_that_changed() -> None:
    """Two workers on pairs of four statements among five thousand: a block sends a small part of the tables."""
    pairs = np.tile(np.array([[0, 1], [2, 3]], dtype=np.int32), (200, 1))

    def sent(epochs: int) -> int:
        def work(transport: Transport) -> int:
            train(pairs, 5_000, Training(dim=16, epochs=epochs, negatives=1), World(transport))
            return transport.counters.total_sent_nbytes

        return max(run_threads(2, work, timeout_s=60))

    tables = 2 * 5_000 * 16 * 4
    assert 0 < sent(5) - sent(1) < 4 * tables / 50
