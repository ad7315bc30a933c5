"""topk beyond the shared laws: exactness on large tensors, where a sample guides the selection, and its fall-back."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.codecs import codec, topk
from laconic.codecs.topk import TopK
from laconic.errors import BadInput
from reference import codec_topk

NUMEL = 300_007  # more than the sample of 65,536


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
    elif kind == "hidden":  # the sample reads 16 of every 73 elements; all that is large lies elsewhere
        x = np.abs(x) * 1e-6
        x[40:NUMEL:73] = 1.0
    elif kind == "baited":  # the sample sees large values only, so that 30 % are fewer than it promises
        lines = (np.arange(NUMEL) % (NUMEL // 4096)) < 16
        x = np.where(lines, 5.0, x * 1e-3).astype(np.float32)
    return x


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


def test_both_paths_are_taken(monkeypatch):
    """The cases above are worth something only if the sample leads right in some and wrong in others."""
    seen = []
    trim = topk._trim
    monkeypatch.setattr(topk, "_trim", lambda chosen, words, k: seen.append(chosen.size) or trim(chosen, words, k))
    for kind, fraction in (("normal", 0.01), ("baited", 0.3), ("zeros", 0.01)):
        TopK(fraction).select(torch.from_numpy(large(kind)))
    assert 3000 <= seen[0] < 4000  # a few more than k = 3000 candidates
    assert seen[1:] == [NUMEL, NUMEL]


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
