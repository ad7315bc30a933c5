"""sign beyond the shared laws: the formula, the contraction that error feedback needs, its size."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from subjects import MODEST, tensors, values

from laconic.codecs import codec
from laconic.errors import BadInput


@pytest.mark.parametrize("bucket", [32, 96, None])
def test_scale_is_the_mean_magnitude(bucket):
    x = values("normal", 250, 1)
    sign = codec(f"sign({bucket})")
    decoded = sign.decode(sign.encode(x), 250)
    for part, sent in zip(x.split(bucket or 250), decoded.split(bucket or 250), strict=True):
        expected = torch.where(part < 0, -1.0, 1.0) * part.abs().double().mean()
        torch.testing.assert_close(sent, expected.float(), rtol=2e-7, atol=0)


@settings(max_examples=30)
@given(x=tensors(kinds=MODEST))
def test_contraction_is_exactly_the_papers(x):
    """‖x − C(x)‖² = ‖x‖² − Σ ‖x_B‖₁²/|B| ≤ (1 − 1/|B|)·‖x‖² (Karimireddy et al. 2019, Lemma 8)."""
    sign = codec("sign(64)")
    wide = x.double()
    error = float((wide - sign.decode(sign.encode(x), x.numel()).double()).square().sum())
    whole = float(wide.square().sum())
    gain = sum(float(part.abs().sum()) ** 2 / part.numel() for part in wide.split(64) if part.numel())
    assert error == pytest.approx(whole - gain, abs=1e-6 * whole)
    assert error <= (1 - 1 / 64) * whole * (1 + 1e-6)


def test_zero_and_minus_zero_count_as_positive():
    x = torch.tensor([0.0, -0.0, 3.0])
    assert codec("sign").decode(codec("sign").encode(x), 3).tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(("spec", "bits"), [("sign", 1 + 32 / 2048), ("sign(none)", 1.0)])
def test_one_bit_is_one_bit(spec, bits):
    numel = 1 << 22
    assert 8 * codec(spec).max_nbytes(numel) / numel == pytest.approx(bits, abs=1e-4)


@pytest.mark.parametrize("bucket", ["0", "-32", "33", "1.5", "text"])
def test_buckets_that_split_a_word_are_refused(bucket):
    with pytest.raises(BadInput, match="multiple of 32"):
        codec(f"sign({bucket})")
