"""What methods say they cost is what `laconic cost` says, and what is counted."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from torch import nn

from laconic import operators
from laconic.operators import Convolution
from laconic.planner import formulas
from laconic.planner.cost import cost
from operators.subjects import convolutions
from reference import convolution as reference

VGG = Convolution(3, 64, 128, (56, 48), (3, 3), (1, 1), (1, 1), (1, 1))


@pytest.mark.parametrize("spec", ["native", "direct", "im2col", "im2col(true)", "prepacked"])
@given(conv=convolutions())
def test_methods_that_sum_as_it_stands_agree_with_the_planner(spec, conv):
    found = operators.build(spec).cost(conv)
    work, depth = formulas.direct(conv)
    assert found.multiplications == work
    assert max(1, found.depth) == depth


def test_winograd_agrees_with_the_planner():
    found = operators.build(f"winograd({formulas.TILE})").cost(VGG)
    work, depth = formulas.winograd(VGG)
    alpha, m, r, tiles = 4, 2, 3, 3 * 28 * 24
    filters = alpha * r * (r + alpha) * 64 * 128
    images = tiles * (2 * alpha**3 * 64 + alpha * m * (alpha + m) * 128)
    assert found.depth == depth
    assert found.multiplications == work - filters - images


def test_fft_agrees_with_the_planner_where_the_transform_is_as_long_as_the_image():
    conv = Convolution(2, 16, 8, (32, 64), (5, 5), (1, 1), (0, 0), (1, 1))
    found, (work, depth) = operators.build("fft").cost(conv), formulas.fft(conv)
    pixels = 32 * 64
    products = work - 5 * pixels * np.log2(pixels) * (8 * 16 + 2 * 16 + 2 * 8)
    assert found.depth == depth
    # A complex product is four real ones, and a real image needs half of the frequencies, and those in between.
    assert found.multiplications == 4 * products * (64 // 2 + 1) / 64


def test_a_model_costs_what_its_convolutions_do():
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.Conv2d(8, 4, 5, stride=2, groups=2))
    layers = cost(model, batch=2, sample=(3, 20, 24)).layers
    convs = [
        Convolution(2, 3, 8, (20, 24), (3, 3), (1, 1), (1, 1), (1, 1)),
        Convolution(2, 8, 4, (20, 24), (5, 5), (2, 2), (0, 0), (1, 1), 2),
    ]
    for layer, conv in zip([layer for layer in layers if layer.kind == "Conv2d"], convs, strict=True):
        found = operators.build("native").cost(conv)
        assert layer.multiply_adds == found.multiplications
        assert layer.methods["direct"] == (found.multiplications, found.depth)


def test_counted_multiplications_of_winograd_equal_the_formula():
    conv = Convolution(2, 3, 4, (8, 12), (3, 3), (1, 1), (1, 1), (1, 1))
    rng = np.random.default_rng(0)
    x, w = rng.standard_normal(conv.input_shape), rng.standard_normal(conv.weight_shape)
    _, counted = reference.by_winograd(x, w, (1, 1))
    assert operators.build("winograd(2)").cost(conv).multiplications == counted
    assert conv.multiplications / counted == 2.25
    assert conv.multiplications / operators.build("winograd(4)").cost(conv).multiplications == 4
