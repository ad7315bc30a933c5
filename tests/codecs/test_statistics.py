"""What codecs promise on average: no bias, independent rounding, bounded variance, contraction.

Every random quantity is a function of (seed, step), so these tests give the same verdict on every run; the 5σ limits
say how unlikely that verdict would be for a codec that keeps its promise.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from subjects import ALL, MODEST, SINGLE, tensors, values

from laconic import codecs

STEPS = 256
NUMEL = 2048
UNBIASED = [spec for spec in ALL if codecs.codec(spec).unbiased]
STOCHASTIC_ROUNDING = [
    spec for spec in SINGLE if codecs.codec(spec).stochastic and codecs.codec(spec).kind == "quantiser"
]
BIASED = [spec for spec in ALL if not codecs.codec(spec).unbiased and not codecs.codec(spec).stochastic]
few = settings(settings.get_profile("codecs"), max_examples=25)


def decoded_over_steps(codec: codecs.Codec, x: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """(steps, numel) float64: what arrives when the same x is sent at every step."""
    return torch.stack([codec.decode(codec.encode(x, step=step), x.numel()).double() for step in range(steps)])


def plateau(value: float) -> torch.Tensor:
    """`value` everywhere but for one larger element per 512, which fixes every scale."""
    x = torch.full((NUMEL,), value)
    x[::512] = 1.0
    return x


@pytest.mark.parametrize("spec", UNBIASED)
@pytest.mark.parametrize("kind", ["normal", "uniform", "sparse"])
def test_unbiased_codec_has_no_bias_in_any_element(spec, kind):
    """|mean − x| ≤ 5σ/√n for each element, σ from the sample or, where no rounding was seen, from one step of the grid.

    The second term is Bernstein's: an element rounded up with probability p ≪ 1/n may show no deviation at all.
    """
    x = values(kind, NUMEL, 21)
    arrived = decoded_over_steps(codecs.codec(spec), x)
    spread = (arrived.max(dim=0).values - arrived.min(dim=0).values).max()
    limit = 5 * arrived.std(dim=0) / math.sqrt(STEPS) + 25 / 3 * spread / STEPS + 1e-6 * x.abs().max()
    assert bool(((arrived.mean(dim=0) - x).abs() <= limit).all())


@pytest.mark.parametrize("spec", UNBIASED)
@pytest.mark.parametrize("value", [0.003, 0.1, -0.27, 0.5, -0.77, 0.99])
def test_unbiased_codec_has_no_bias_on_equal_values(spec, value):
    """Half a million roundings of one value: a bias of a thousandth of a grid step shows."""
    x = plateau(value)
    rest = x == value
    arrived = decoded_over_steps(codecs.codec(spec), x)[:, rest]
    # A bucket's deviations share its scale and selectors share one draw, so the samples are the means of the steps.
    means = arrived.mean(dim=1)
    rounding = 5e-7 * abs(value)
    assert abs(float(means.mean()) - value) <= 5 * float(means.std()) / math.sqrt(STEPS) + rounding


@pytest.mark.parametrize("spec", STOCHASTIC_ROUNDING)
@pytest.mark.parametrize("value", [0.013, 0.1, -0.29, 0.61])
def test_rounding_is_independent_across_elements_of_equal_value(spec, value):
    """var(mean over m elements) = σ²/m. One threshold per call, as in a known peer, would give σ²: m times as much."""
    x = plateau(value)
    arrived = decoded_over_steps(codecs.codec(spec), x)[:, x == value]
    sigma_squared = float(arrived.var())
    if sigma_squared < 1e-12:
        pytest.skip("this value is on the codec's grid: nothing is rounded")
    m = arrived.shape[1]
    ratio = float(arrived.mean(dim=1).var()) * m / sigma_squared
    assert abs(ratio - 1) < 5 * math.sqrt(2 / (STEPS - 1))
    for lag, other in (("next element", arrived.roll(1, dims=1)), ("next step", arrived.roll(1, dims=0))):
        centred, moved = arrived - arrived.mean(), other - arrived.mean()
        correlation = float((centred * moved).mean()) / sigma_squared
        assert abs(correlation) < 5 / math.sqrt(arrived.numel()), lag


@pytest.mark.parametrize("spec", STOCHASTIC_ROUNDING)
def test_seed_and_step_both_change_the_draws(spec):
    codec = codecs.codec(spec)
    x = plateau(0.29)
    other = type(codec)(**{**vars(codec), "seed": 1})
    assert not torch.equal(codec.encode(x, step=0), other.encode(x, step=0))
    assert not torch.equal(codec.encode(x, step=0), codec.encode(x, step=1))


def squared_errors(codec: codecs.Codec, x: torch.Tensor) -> tuple[float, float]:
    """Mean over the steps of ‖Q(x) − x‖², and the standard error of that mean."""
    errors = (decoded_over_steps(codec, x) - x.double()).square().sum(dim=1)
    return float(errors.mean()), float(errors.std()) / math.sqrt(STEPS)


@pytest.mark.parametrize("spec", BIASED)
@few
@given(x=tensors(kinds=MODEST))
def test_biased_codec_never_adds_error(spec, x):
    """‖x − C(x)‖² ≤ ‖x‖², without which error feedback diverges."""
    codec = codecs.codec(spec)
    wide = x.double()
    error = float((codec.decode(codec.encode(x), x.numel()).double() - wide).square().sum())
    assert error <= float(wide.square().sum()) * (1 + 1e-6)
