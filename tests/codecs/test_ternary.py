"""ternary beyond the shared laws: the paper's probabilities and variance, clipping, five trits to a byte."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from subjects import values

from laconic.codecs import codec
from laconic.errors import BadInput
from reference import frame

STEPS = 200


def arrivals(spec: str, x: torch.Tensor) -> torch.Tensor:
    ternary = codec(spec)
    return torch.stack([ternary.decode(ternary.encode(x, step=step), x.numel()).double() for step in range(STEPS)])


def test_values_are_zero_or_plus_minus_the_largest():
    x = values("normal", 1000, 1)
    sent = arrivals("ternary", x)
    s = x.abs().max().double()
    assert set(sent.unique().tolist()) == {-float(s), 0.0, float(s)}
    assert bool((sent * x >= 0).all())


def test_variance_is_the_formulas():
    """E‖Q(x) − x‖² = s·‖x‖₁ − ‖x‖²."""
    x = values("normal", 2000, 2)
    errors = (arrivals("ternary", x) - x.double()).square().sum(dim=1)
    wide = x.double()
    expected = float(wide.abs().max() * wide.abs().sum() - wide.square().sum())
    assert float(errors.mean()) == pytest.approx(expected, abs=5 * float(errors.std()) / math.sqrt(STEPS))


def test_clipping_limits_to_multiples_of_sigma_and_lowers_the_variance():
    x = values("normal", 4000, 3)
    sigma = float(x.double().square().mean().sqrt())
    sent = arrivals("ternary(2.5)", x)
    assert float(sent.max()) == pytest.approx(2.5 * sigma, rel=1e-6)
    clipped = x.double().clamp(-2.5 * sigma, 2.5 * sigma)
    limit = 5 * 2.5 * sigma / math.sqrt(STEPS)
    assert float((sent.mean(dim=0) - clipped).abs().max()) < limit
    free = (arrivals("ternary", x) - x).square().mean()
    assert (sent - x).square().mean() < 0.8 * free


def test_clipping_leaves_equal_values_alone():
    x = torch.full((50,), 3.0)
    assert torch.equal(codec("ternary(1)").decode(codec("ternary(1)").encode(x), 50), x)


def test_only_the_unclipped_is_unbiased():
    assert codec("ternary").unbiased
    assert not codec("ternary(2.5)").unbiased


def test_every_byte_of_five_trits_decodes_to_its_digits():
    """All 243 bytes at each place of a word, against division; the kernel multiplies by a reciprocal instead."""
    for position in range(4):
        words = np.arange(64, dtype="<u4")[None, :] + 64 * np.arange(4, dtype="<u4")[:, None]  # four groups of 64 words
        words = np.minimum(words, 242)
        body = np.float32(1).tobytes() + (words << (8 * position)).astype("<u4").tobytes()
        payload = torch.from_numpy(frame.payload("ternary", 4 * 1280, body).copy())
        planes_sent = codec("ternary").decode(payload, 4 * 1280).numpy().reshape(4, 20, 64)  # group, place, word
        for place in range(20):
            digits = words // 3 ** (place % 5) % 3 if place // 5 == position else np.zeros_like(words)
            assert np.array_equal(planes_sent[:, place], digits.astype(np.float32) - 1)


@pytest.mark.parametrize(("spec", "bits"), [("ternary", 1.6), ("ternary(bucket=1280)", 1.6 + 32 / 1280)])
def test_five_trits_to_a_byte(spec, bits):
    numel = 1280 << 12
    assert 8 * codec(spec).max_nbytes(numel) / numel == pytest.approx(bits, abs=1e-4)
    assert codec("ternary").max_nbytes(20) == codec("ternary").max_nbytes(1) == 16 + 4 + 4  # one scale, one word


@pytest.mark.parametrize("spec", ["ternary(0.5)", "ternary(x)", "ternary(bucket=512)", "ternary(bucket=0)"])
def test_bad_arguments_are_refused(spec):
    with pytest.raises(BadInput, match="ternary"):
        codec(spec)
