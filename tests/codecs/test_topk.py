"""topk beyond the shared laws: exactness on large tensors, where a sample guides the selection, and its fall-back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.codecs import codec, topk
from laconic.codecs.topk import TopK
from laconic.errors import BadInput
from reference import codec_topk

NUMEL = 300_007  # more than the sample


def expected(x: np.ndarray, k: int) -> np.ndarray:
    """argsort by magnitude, ties to the lower index."""
    return np.sort(np.argsort(-np.abs(x), kind="stable")[:k])


def large(kind: str) -> np.ndarray:
    rng = np.random.default_rng(5)
    x = rng.standard_normal(NUMEL).astype(np.float32)
    if kind == "layers":  # scales that differ by 10⁶ along the tensor, as in a bucket of several layers
        x *= np.repeat(np.float32(10.0) ** np.arange(-3, 4), -(-NUMEL // 7))[:NUMEL]
    elif kind == "few values":
        x = np.round(x)
    elif kind == "mostly zeros":
        x[rng.random(NUMEL) < 0.999] = 0
    elif kind == "zeros":
        x[:] = 0
    elif kind == "equal":
        x = np.where(x < 0, -2.5, 2.5).astype(np.float32)
    elif kind == "hidden":  # all that is large lies where the sample does not look
        x = np.where(sampled(), x * 1e-6, 1.0 + np.abs(x)).astype(np.float32)
    elif kind == "baited":  # the sample sees large values only, so that 30 % are fewer than it promises
        x = np.where(sampled(), 5.0, x * 1e-3).astype(np.float32)
    return x


def sampled() -> np.ndarray:
    """Which elements the sample reads."""
    position = np.arange(NUMEL, dtype=np.int32).view(np.float32)
    seen = topk._sample(position, position, False, topk._LINES).view(np.int32)
    return np.isin(np.arange(NUMEL), seen)


KINDS = ["normal", "layers", "few values", "mostly zeros", "zeros", "equal", "hidden", "baited"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("fraction", [0.001, 0.01, 0.3, 7])
def test_selection_is_exact_whatever_the_sample_saw(kind, fraction):
    x = large(kind)
    chosen = TopK(fraction).select(torch.from_numpy(x))
    assert np.array_equal(chosen, expected(x, codec_topk.k_of(fraction, NUMEL)))


@pytest.mark.parametrize("kind", KINDS)
def test_fused_feedback_is_exact_whatever_the_sample_saw(kind):
    x, residual = torch.from_numpy(large(kind)), torch.from_numpy(large("normal")) * 0.01
    total = x + residual
    small = TopK(0.01)
    payload = small.encode_feedback(x, residual)
    assert torch.equal(payload, small.encode(total))
    assert torch.equal(residual, total - small.decode(payload, NUMEL))


@pytest.mark.parametrize(
    ("kind", "fraction", "passes", "candidates"),
    [("normal", 0.01, 1, (3000, 8000)), ("hidden", 0.01, 2, (3000, 12000)), ("equal", 0.01, 2, (NUMEL, NUMEL))],
)
def test_every_path_is_taken(monkeypatch, kind, fraction, passes, candidates):
    """The cases above are worth something only if the sample leads right in some and wrong in others."""
    calls, sizes = [], []
    collect, trim = topk.collect, topk._trim
    monkeypatch.setattr(topk, "collect", lambda *args, **options: calls.append(1) or collect(*args, **options))
    monkeypatch.setattr(topk, "_trim", lambda chosen, words, k: sizes.append(chosen.size) or trim(chosen, words, k))
    TopK(fraction).select(torch.from_numpy(large(kind)))
    assert len(calls) == passes
    assert candidates[0] <= sizes[0] <= candidates[1]


@pytest.mark.parametrize("nonzero", [0, 1, 999, 1000, 1001])
def test_zeros_are_filled_in_without_looking_at_all_values(monkeypatch, nonzero):
    """As in the gradient of an embedding: sorting all the equal zeros took sixty times as long as all the rest."""
    x = np.zeros(100_000, np.float32)
    x[np.random.default_rng(nonzero).permutation(x.size)[:nonzero]] = 1.5
    sizes, trim = [], topk._trim
    monkeypatch.setattr(topk, "_trim", lambda chosen, words, k: sizes.append(chosen.size) or trim(chosen, words, k))
    assert np.array_equal(TopK(1000).select(torch.from_numpy(x)), expected(x, 1000))
    assert max(sizes, default=0) <= 1001


def test_sample_does_not_meet_the_same_columns_of_a_matrix():
    """At even distances it saw a few of the 784 columns, all of them dark in MNIST."""
    position = np.arange(1024 * 784, dtype=np.int32).view(np.float32)
    columns = topk._sample(position, position, False, topk._LINES).view(np.int32) % 784
    assert np.unique(columns).size == 784


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("k", "bucket"), [(16, 512), (1, 3), (100, 1000), (512, 512)])
def test_buckets_are_exact(kind, k, bucket):
    x = large(kind)[:50_003]
    chosen = TopK(k, bucket=bucket).select(torch.from_numpy(x))
    assert chosen.tolist() == codec_topk.select(x, k, bucket)


def test_contraction():
    x = torch.from_numpy(large("normal"))
    error = (x - (c := codec("topk(0.1)")).decode(c.encode(x), NUMEL)).square().sum() / x.square().sum()
    assert error <= 1 - 0.1


def test_cost_is_as_documented():
    numel = 1 << 20
    small, bucketed = TopK(0.01), TopK(16, bucket=512)
    assert (8 * small.max_nbytes(numel) / 10486) == pytest.approx(40.57, abs=0.1)
    assert 8 * bucketed.max_nbytes(numel) / (numel // 32) == pytest.approx(39.0, abs=0.1)


@pytest.mark.parametrize(
    ("spec", "match"),
    [
        ("topk(0)", "between 0 and 1"),
        ("topk(1.0)", "between 0 and 1"),
        ("topk(-3)", "between 0 and 1"),
        ("topk(1.5)", "between 0 and 1"),
        ("topk(nan)", "between 0 and 1"),
        ("topk(some)", "between 0 and 1"),
        ("topk(true)", "between 0 and 1"),
        ("topk(16, bucket=8)", "at least 16"),
        ("topk(0.1, bucket=0)", "at least 1"),
        ("topk(0.1, bucket=2.5)", "whole number"),
        ("topk(0.1, bucket=many)", "whole number"),
    ],
)
def test_parameters_out_of_range_are_refused(spec, match):
    with pytest.raises(BadInput, match=match):
        codec(spec)
