"""adaptive beyond the shared laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.codecs import codec
from laconic.codecs.adaptive import Adaptive
from laconic.errors import BadInput


def test_each_sign_sends_its_own_proportion_and_mean():
    rng = np.random.default_rng(1)
    x = np.concatenate([rng.random(8000) + 1, -rng.random(2000) / 100, np.zeros(5000)]).astype(np.float32)
    rng.shuffle(x)
    small = Adaptive(0.1)
    sent = small.decode(small.encode(torch.from_numpy(x)), x.size).numpy()
    assert (sent > 0).sum() == 800
    assert (sent < 0).sum() == 200
    assert sent[sent > 0][0] == pytest.approx(np.sort(x)[-800:].mean(), rel=1e-6)
    assert sent[sent < 0][0] == pytest.approx(np.sort(x)[:200].mean(), rel=1e-6)
    assert np.array_equal(sent > 0, x >= np.sort(x)[-800])


def test_large_tensors_are_exact():
    """More elements than the sample that guides the selection."""
    x = np.random.default_rng(2).standard_normal(200_001).astype(np.float32)
    chosen = Adaptive(0.01).select(torch.from_numpy(x))
    above, below = np.sort(x[x > 0])[::-1], np.sort(x[x < 0])
    bounds = above[round(above.size * 0.01) - 1], below[round(below.size * 0.01) - 1]
    assert np.array_equal(chosen, np.flatnonzero((x >= bounds[0]) | (x <= bounds[1])))


def test_the_sum_of_what_is_sent_is_kept():
    """A mean preserves the sum of what it replaces."""
    x = torch.from_numpy(np.random.default_rng(3).standard_normal(10_000).astype(np.float32))
    small = Adaptive(0.05)
    sent = small.decode(small.encode(x), x.numel())
    assert float(sent.double().sum()) == pytest.approx(float(x[sent != 0].double().sum()), rel=1e-5)


def test_zeros_are_never_sent():
    small = Adaptive(0.5)
    assert small.select(torch.tensor([0.0, -0.0, 0.0])).size == 0
    assert small.select(torch.tensor([0.0, -1.0, 0.0])).tolist() == [1]


def test_payload_stays_within_max_nbytes_where_rounding_favours_both_signs():
    small = Adaptive(0.5)
    for positive in range(12):
        x = torch.cat([torch.ones(positive), -torch.ones(11 - positive)])
        assert small.encode(x).numel() <= small.max_nbytes(11)
        assert small.select(x).size <= small.max_count(11)


@pytest.mark.parametrize("fraction", ["0", "1", "1.0", "-0.1", "nan", "x"])
def test_fractions_out_of_range_are_refused(fraction):
    with pytest.raises(BadInput, match="adaptive: fraction"):
        codec(f"adaptive({fraction})")
