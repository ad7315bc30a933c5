"""onebit beyond the shared laws: the paper's formula, its optimality, its size."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from subjects import values

from laconic.codecs import codec
from laconic.errors import BadInput


def test_values_are_the_means_of_the_two_sides_of_each_bucket():
    x = values("normal", 200, 1)
    decoded = codec("onebit(64)").decode(codec("onebit(64)").encode(x), 200)
    for bucket, sent in zip(x.split(64), decoded.split(64), strict=True):
        for side in (bucket >= 0, bucket < 0):
            mean = np.float32(bucket[side].double().mean())
            torch.testing.assert_close(sent[side], torch.full_like(sent[side], mean), rtol=2e-7, atol=0)


def test_squared_error_is_the_formulas_and_no_other_pair_of_values_does_better():
    x = values("normal", 512, 2).double()
    onebit = codec("onebit(512)")
    decoded = onebit.decode(onebit.encode(x.float()), 512).double()
    error = (x - decoded).square().sum()
    above, below = x[x >= 0], x[x < 0]
    formula = x.square().sum() - above.numel() * above.mean() ** 2 - below.numel() * below.mean() ** 2
    assert error == pytest.approx(float(formula), rel=1e-6)
    for nudge in (0.99, 1.01):
        assert (x - nudge * decoded).square().sum() > error


def test_one_sided_and_zero_buckets():
    onebit = codec("onebit(32)")
    for x in (torch.ones(40), -torch.ones(40), torch.zeros(40), -torch.zeros(40)):
        assert torch.equal(onebit.decode(onebit.encode(x), 40), x + 0.0)


def test_huge_and_tiny_values_share_a_bucket_without_overflow():
    x = torch.tensor([3e38, 3e38, -1e-40, -3e38])
    decoded = codec("onebit(32)").decode(codec("onebit(32)").encode(x), 4)
    torch.testing.assert_close(decoded, torch.tensor([3e38, 3e38, -1.5e38, -1.5e38]))


@pytest.mark.parametrize("spec", ["onebit", "onebit(none)"])
def test_one_huge_value_leaves_the_mean_of_the_other_side_alone(spec):
    x = torch.full((2048,), 1e-3)
    x[0] = -1e20
    decoded = codec(spec).decode(codec(spec).encode(x), 2048)
    torch.testing.assert_close(decoded[1:], x[1:], rtol=1e-6, atol=0)
    assert float(decoded[0]) == float(x[0])


SIZES = [("onebit", 1 + 64 / 256), ("onebit(512)", 1 + 64 / 512), ("onebit(none)", 1.0)]


@pytest.mark.parametrize(("spec", "bits"), SIZES)
def test_one_bit_is_one_bit(spec, bits):
    numel = 1 << 22
    assert 8 * codec(spec).max_nbytes(numel) / numel == pytest.approx(bits, abs=1e-4)


@pytest.mark.parametrize("bucket", ["0", "-32", "33", "1.5", "text"])
def test_buckets_that_split_a_word_are_refused(bucket):
    with pytest.raises(BadInput, match="multiple of 32"):
        codec(f"onebit({bucket})")
