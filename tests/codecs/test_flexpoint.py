"""flexpoint beyond the shared laws: its error bound, saturation, and the prediction of the exponent."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given, settings
from subjects import tensors, values

from laconic.codecs import codec
from laconic.codecs.flexpoint import FlexPoint, predict_exponent
from laconic.errors import BadInput, PayloadError


@pytest.mark.parametrize("bits", [8, 16])
@settings(max_examples=40)
@given(x=tensors())
def test_error_is_at_most_half_a_unit_below_the_top(bits, x):
    flex = FlexPoint(bits)
    sent = flex.decode(flex.encode(x), x.numel()).double()
    largest = float(x.abs().max()) if x.numel() else 0.0
    unit = max(2.0 ** -(bits - 1) * 2 * largest, 2.0**-149)
    top = x.double().abs() > largest * (1 - 2.0 ** -(bits - 2))
    error = (sent - x.double()).abs()
    assert bool((error[~top] <= unit / 2).all())
    assert bool((error <= unit).all())


def test_small_integers_survive_exactly():
    x = torch.arange(-32767.0, 32768.0)
    assert torch.equal(FlexPoint().decode(FlexPoint().encode(x), x.numel()), x)


def test_given_exponent_saturates_and_any_flexpoint_of_these_bits_decodes():
    x = torch.tensor([1.0, 100.0, -100.0, 0.3])
    payload = codec("flexpoint(8, exponent=-4)").encode(x)
    sent = codec("flexpoint(8)").decode(payload, 4)
    assert sent.tolist() == [1.0, 127 / 16, -127 / 16, 5 / 16]
    assert FlexPoint(8).peak(payload, 4) == 127 / 16
    with pytest.raises(PayloadError):
        codec("flexpoint(16)").decode(payload, 4)


def test_prediction_follows_a_growing_and_a_shrinking_tensor():
    """Autoflex in the loop: no saturation under slow growth, recovery in a few steps from a sudden one, and back."""
    flex, exponent, peaks = FlexPoint(16), -14, []
    saturated = []
    for step in range(120):
        size = 1.02**step if step < 60 else 1e4 if step < 90 else 1.0
        x = values("uniform", 500, step) * size
        payload = dataclasses.replace(flex, exponent=exponent).encode(x)
        peak = flex.peak(payload, 500)
        if peak >= 32767 * 2.0**exponent:
            saturated.append(step)
        peaks = [*peaks, peak][-16:]
        exponent = predict_exponent(peaks, exponent)
    assert saturated
    assert min(saturated) == 60
    assert max(saturated) < 75
    assert 2.0**-14 <= 2.0**exponent <= 2.0**-12


def test_prediction_leaves_headroom_of_two_over_the_largest_peak():
    for peak in (1e-20, 0.3, 1.0, 7e10):
        exponent = predict_exponent([peak], math.frexp(peak)[1] - 14)
        assert 2 * peak <= 2.0 ** (exponent + 15) < 4.1 * peak


def test_prediction_allows_for_the_spread_of_the_history():
    """2·(5 + 3·1.886 + 100·2⁻¹²) = 21.4 < 2⁵; of equal peaks 2·(5 + 100·2⁻¹²) = 10.05 < 2⁴."""
    assert predict_exponent([1.0, 1.0, 5.0], -12) == 5 - 15
    assert predict_exponent([5.0, 5.0, 5.0], -12) == 4 - 15


def test_prediction_after_saturation_forgets_the_past_and_doubles():
    """2·(2·2 + 100·2⁻¹⁴) = 8.01 < 2⁴, whatever came before; undoubled it would be 4.01 < 2³."""
    top = 32767 * 2.0**-14
    assert predict_exponent([top], -14) == predict_exponent([1e-9, 1e6, top], -14) == 4 - 15


@pytest.mark.parametrize("peaks", [[], [float("nan")], [1.0, -1.0], [float("inf")]])
def test_prediction_refuses_what_is_no_history(peaks):
    with pytest.raises(BadInput, match="peaks"):
        predict_exponent(peaks, 0)


@pytest.mark.parametrize("spec", ["flexpoint(4)", "flexpoint(16, exponent=114)", "flexpoint(8, exponent=-150)"])
def test_bad_arguments_are_refused(spec):
    with pytest.raises(BadInput, match="flexpoint"):
        codec(spec)
