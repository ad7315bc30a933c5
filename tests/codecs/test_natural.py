"""natural beyond the shared laws: the paper's probabilities and variance, the ends of the exponents' window."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from subjects import values

from laconic.codecs import codec
from laconic.errors import BadInput

STEPS = 200


def arrivals(x: torch.Tensor) -> torch.Tensor:
    natural = codec("natural")
    return torch.stack([natural.decode(natural.encode(x, step=step), x.numel()).double() for step in range(STEPS)])


def test_values_become_one_of_the_two_nearest_powers_of_two():
    x = values("mixed", 3000, 1)
    sent = codec("natural").decode(codec("natural").encode(x), 3000).double()
    mantissa, _ = torch.frexp(sent)
    assert bool((mantissa.abs() == 0.5).all())
    ratio = sent / x.double()
    assert float(ratio.min()) > 0.5
    assert float(ratio.max()) <= 2.0


def test_variance_is_the_formulas_and_below_an_eighth():
    """E(C(x) − x)² = (|x| − 2ᵃ)(2ᵃ⁺¹ − |x|) ≤ x²/8 (Horváth et al. 2019, Theorem 1)."""
    x = values("normal", 2000, 2)
    errors = (arrivals(x) - x.double()).square().sum(dim=1)
    magnitude = x.double().abs()
    low = 2.0 ** torch.floor(torch.log2(magnitude))
    expected = float(((magnitude - low) * (2 * low - magnitude)).sum())
    sigma = float(errors.std()) / math.sqrt(STEPS)
    assert float(errors.mean()) == pytest.approx(expected, abs=5 * sigma)
    assert expected <= float(magnitude.square().sum()) / 8


def test_powers_of_two_survive_exactly_over_the_whole_of_float32():
    for exponent in range(-126, 128):
        x = torch.tensor([2.0**exponent, -(2.0**exponent)])
        assert torch.equal(codec("natural").decode(codec("natural").encode(x), 2), x), exponent


def test_values_below_the_window_are_still_unbiased():
    """Beside 1e30, the least power is 2^(100 − 126): 5e-9 is a third of it, and arrives a third of the time."""
    x = torch.full((2048,), 5e-9)
    x[0] = 1e30
    sent = arrivals(x)[:, 1:]
    least = 2.0**-26
    assert set(sent.unique().tolist()) == {0.0, least}
    p = 5e-9 / least
    assert float((sent / least).mean()) == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / sent.numel()))


def test_denormals_become_zero_or_the_least_normal():
    x = torch.full((1000,), 2.0**-128)
    sent = arrivals(x)
    assert set(sent.unique().tolist()) == {0.0, 2.0**-126}
    assert float(sent.mean()) * 2.0**126 == pytest.approx(0.25, abs=5 * math.sqrt(0.25 * 0.75 / sent.numel()))


def test_beyond_the_largest_power_it_saturates():
    x = torch.tensor([np.finfo(np.float32).max, -3e38])
    assert arrivals(x).unique().tolist() == [-(2.0**127), 2.0**127]


def test_a_value_takes_a_byte():
    assert codec("natural").max_nbytes(1 << 20) == 16 + (1 << 20) + (1 << 20) // 2048


def test_bad_seed_is_refused():
    with pytest.raises(BadInput, match="seed"):
        codec("natural(x)")
