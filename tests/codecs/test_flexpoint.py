"""flexpoint beyond the shared laws: its error bound and saturation."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from subjects import tensors

from laconic.codecs import codec
from laconic.codecs.flexpoint import FlexPoint
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
    with pytest.raises(PayloadError):
        codec("flexpoint(16)").decode(payload, 4)


@pytest.mark.parametrize("spec", ["flexpoint(4)", "flexpoint(16, exponent=114)", "flexpoint(8, exponent=-150)"])
def test_bad_arguments_are_refused(spec):
    with pytest.raises(BadInput, match="flexpoint"):
        codec(spec)
