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
few = settings(max_examples=15)


def decoded_over_steps(codec: codecs.Codec, x: torch.Tensor, steps: int = STEPS) -> torch.Tensor:
    """(steps, numel) float64: what arrives when the same x is sent at every step."""
    return torch.stack([codec.decode(codec.encode(x, step=step), x.numel()).double() for step in range(steps)])


def plateau(value: float) -> torch.Tensor:
    """`value` everywhere but for one larger element per 512, which fixes every scale."""
    x = torch.full((NUMEL,), value)
    x[::512] = 1.0
    return x


@pytest.mark.parametrize("spec", UNBIASED)
@pytest.mark.parametrize("kind", ["normal", "sparse"])
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
@pytest.mark.parametrize("value", [0.003, -0.27, 0.77])
def test_unbiased_codec_has_no_bias_on_equal_values(spec, value):
    """Half a million roundings of one value: a bias of a thousandth of a grid step shows."""
    x = plateau(value)
    rest = x == value
    arrived = decoded_over_steps(codecs.codec(spec), x)[:, rest]
    # A bucket's deviations share its scale and selectors share one draw, so the samples are the means of the steps.
    means = arrived.mean(dim=1)
    rounding = 5e-7 * abs(value)
    assert abs(float(means.mean()) - value) <= 5 * float(means.std()) / math.sqrt(STEPS) + rounding


@pytest.mark.parametrize("quantiser", ["qsgd(2)", "qsgd(4)", "natural", "ternary", "linear8(stochastic=true)"])
@pytest.mark.parametrize("k", [1, 4])
def test_choosing_and_rounding_draw_apart(k, quantiser):
    """Of ten elements: draws that selector and quantiser share would always round some of them the same way."""
    x = torch.tensor([1.5, 0.4] * 5)
    arrived = decoded_over_steps(codecs.codec(f"randomk({k}, scaled=true)+{quantiser}"), x, steps=4000)
    sigma = arrived.std(dim=0) / math.sqrt(len(arrived))
    assert bool(((arrived.mean(dim=0) - x).abs() <= 5 * sigma).all())


@pytest.mark.parametrize("spec", STOCHASTIC_ROUNDING)
@pytest.mark.parametrize("value", [0.1, -0.29])
def test_rounding_is_independent_across_elements_of_equal_value(spec, value):
    """var(mean over m elements) = Σσᵢ²/m². One threshold per call, as in a known peer, would give m times as much."""
    x = plateau(value)
    arrived = decoded_over_steps(codecs.codec(spec), x)[:, x == value]
    deviations = arrived - arrived.mean(dim=0)
    variances = deviations.square().sum(dim=0) / (STEPS - 1)
    assert float(variances.max()) > 1e-12, "nothing was rounded: the value is on the codec's grid, choose another"
    ratio = float(deviations.sum(dim=1).var()) / float(variances.sum())
    assert abs(ratio - 1) < 5 * math.sqrt(2 / (STEPS - 1))
    # Subtracting each element's sample mean makes its steps correlate by −1/(n − 1).
    varied = int((variances > 1e-12).sum())
    limit = 5 / math.sqrt(varied * STEPS) + 1 / (STEPS - 1)
    for lag, other in (("next element", deviations.roll(1, dims=1)), ("next step", deviations.roll(1, dims=0))):
        correlation = float((deviations * other).sum() / deviations.square().sum())
        assert abs(correlation) < limit, lag


@pytest.mark.parametrize("spec", STOCHASTIC_ROUNDING)
def test_seed_and_step_both_change_the_draws(spec):
    codec = codecs.codec(spec)
    x = values("normal", NUMEL, 22)
    other = type(codec)(**{**vars(codec), "seed": 1})
    assert not torch.equal(codec.encode(x, step=0), other.encode(x, step=0))
    assert not torch.equal(codec.encode(x, step=0), codec.encode(x, step=1))


def squared_errors(codec: codecs.Codec, x: torch.Tensor) -> tuple[float, float]:
    """Mean over the steps of ‖Q(x) − x‖², and the standard error of that mean."""
    errors = (decoded_over_steps(codec, x) - x.double()).square().sum(dim=1)
    return float(errors.mean()), float(errors.std()) / math.sqrt(STEPS)


def buckets(x: torch.Tensor, bucket: int | None) -> list[torch.Tensor]:
    return list(x.double().split(bucket or x.numel()))


@pytest.mark.parametrize("kind", ["normal", "uniform", "sparse"])
@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("bucket", [64, 512, None])
def test_qsgd_variance_is_within_the_papers_bound(bits, bucket, kind):
    """E‖Q(x) − x‖² ≤ min(d/s², √d/s)·‖x‖² in every bucket of d values (Alistarh et al. 2017, Lemma 3.1)."""
    codec = codecs.codec(f"qsgd({bits}, bucket={str(bucket).lower()})")
    x = values(kind, NUMEL, 31)
    s = 2 ** (bits - 1) - 1
    bound = sum(min(len(b) / s**2, math.sqrt(len(b)) / s) * float(b.square().sum()) for b in buckets(x, bucket))
    mean, error = squared_errors(codec, x)
    assert 0 < mean <= bound + 5 * error


@pytest.mark.parametrize("kind", ["normal", "uniform", "sparse"])
def test_qsgd_variance_with_the_maximum_norm(kind):
    """Two neighbouring levels max|x|/s apart: at most a quarter of the square of that for each value."""
    x = values(kind, NUMEL, 32)
    bound = sum(len(b) / 4 * (float(b.abs().max()) / 7) ** 2 for b in buckets(x, 512))
    mean, error = squared_errors(codecs.codec("qsgd(4, norm=max)"), x)
    assert 0 < mean <= bound + 5 * error


@pytest.mark.parametrize("kind", ["normal", "uniform", "sparse"])
@pytest.mark.parametrize("bucket", [500, None])
def test_ternary_variance_is_the_papers(bucket, kind):
    """E‖Q(x) − x‖² = Σ (s|xᵢ| − xᵢ²), neither more nor less (Wen et al. 2017)."""
    x = values(kind, NUMEL, 33)
    expected = sum(float(b.abs().max() * b.abs().sum() - b.square().sum()) for b in buckets(x, bucket))
    mean, error = squared_errors(codecs.codec(f"ternary(bucket={str(bucket).lower()})"), x)
    assert abs(mean - expected) <= 5 * error


@pytest.mark.parametrize("bits", [2, 4, 8])
def test_dorefa_error_stays_below_a_step(bits):
    x = values("normal", NUMEL, 34)
    step = 2 * float(x.abs().max()) / (2**bits - 1)
    arrived = decoded_over_steps(codecs.codec(f"dorefa({bits})"), x, steps=16)
    assert float((arrived - x).abs().max()) < step * (1 + 1e-5)


CONTRACTIONS = {
    # ‖x − C(x)‖² ≤ (1 − δ)‖x‖², what is left of ‖x‖² as each codec's docstring gives it
    "topk(0.1)": lambda x: (1 - max(1, round(0.1 * len(x))) / len(x)) * x.square().sum(),
    "topk(16, bucket=512)": lambda x: sum((1 - min(16, len(b)) / len(b)) * b.square().sum() for b in buckets(x, 512)),
    "sign(64)": lambda x: x.square().sum() - sum(b.abs().sum().square() / len(b) for b in buckets(x, 64)),
    "sign(none)": lambda x: x.square().sum() - x.abs().sum().square() / len(x),
    "onebit(64)": lambda x: sum(_within_signs(b) for b in buckets(x, 64)),
    "adacomp(50)": lambda x: x.square().sum() - _explained(_sent_by_adacomp(x, 50)),
    "fp16": lambda x: 2.0**-22 * x.square().sum() + len(x) * 2.0**-50,
    "bf16": lambda x: 2.0**-16 * x.square().sum(),
}


def _within_signs(bucket: torch.Tensor) -> torch.Tensor:
    """The squared distance of each sign's values to their mean."""
    sides = (bucket[bucket >= 0], bucket[bucket < 0])
    return sum((side - side.mean()).square().sum() for side in sides if len(side))


def _sent_by_adacomp(x: torch.Tensor, bin: int) -> torch.Tensor:
    """The magnitudes within a factor 2 of their bin's maximum."""
    sent = torch.cat([b.abs()[2 * b.abs() >= b.abs().max()] for b in buckets(x, bin)])
    return sent[sent > 0]


def _explained(magnitudes: torch.Tensor) -> float:
    """Σm² once each is replaced by their mean."""
    return float(magnitudes.sum().square()) / max(1, len(magnitudes))


@pytest.mark.parametrize("spec", CONTRACTIONS)
@few
@given(x=tensors(kinds=("normal", "uniform", "constant", "sparse", "one_hot")))
def test_claimed_contraction_holds(spec, x):
    codec = codecs.codec(spec)
    if x.numel() == 0:
        return
    if spec == "fp16":
        x = x.clamp(-6e4, 6e4)
    left = float(CONTRACTIONS[spec](x.double()))
    error = float((codec.decode(codec.encode(x), x.numel()).double() - x.double()).square().sum())
    assert error <= left + 1e-6 * float(x.double().square().sum())


@pytest.mark.parametrize("kind", ["normal", "uniform", "sparse"])
@pytest.mark.parametrize("fraction", [0.05, 0.4])
def test_randomk_contracts_on_average_as_claimed(fraction, kind):
    """E‖x − C(x)‖² = (1 − k/n)‖x‖² over the steps, neither more nor less; each step by itself adds no error."""
    x = values(kind, NUMEL, 35)
    k = round(fraction * NUMEL)
    norm = float(x.double().square().sum())
    mean, error = squared_errors(codecs.codec(f"randomk({fraction})"), x)
    assert abs(mean - (1 - k / NUMEL) * norm) <= 5 * error
    assert 0 < error < 0.01 * norm


@pytest.mark.parametrize("spec", BIASED)
@few
@given(x=tensors(kinds=MODEST))
def test_biased_codec_never_adds_error(spec, x):
    """‖x − C(x)‖² ≤ ‖x‖², without which error feedback diverges."""
    codec = codecs.codec(spec)
    wide = x.double()
    error = float((codec.decode(codec.encode(x), x.numel()).double() - wide).square().sum())
    assert error <= float(wide.square().sum()) * (1 + 1e-6)
