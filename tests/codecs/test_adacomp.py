"""adacomp beyond the shared laws: its feedback looks at the gradient and the residual apart."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from subjects import values

from laconic.codecs import codec
from laconic.codecs.adacomp import AdaComp
from laconic.errors import BadInput
from reference import codec_adacomp

few = settings(max_examples=40)


@few
@given(
    numel=st.integers(0, 1200),
    bin=st.integers(1, 130),
    scale=st.sampled_from(["sent", "bins"]),
    kind=st.sampled_from(["normal", "sparse", "zeros", "mixed"]),
    seed=st.integers(0, 2**32 - 1),
)
def test_feedback_matches_the_papers_rule(numel, bin, scale, kind, seed):
    x, residual = values(kind, numel, seed), values("normal", numel, seed + 1) * 0.5
    total = residual + x
    body = codec_adacomp.encode_two(total.numpy(), x.numpy(), bin, scale)
    small = AdaComp(bin, scale)
    payload = small.encode_feedback(x, residual)
    assert np.array_equal(payload[16:].numpy(), body)
    assert torch.equal(residual, total - small.decode(payload, numel))


def test_feedback_differs_from_encoding_the_sum():
    """The gradient opposes the residual's largest element: |H| falls below the bin's maximum, so it is not sent yet."""
    x, residual = torch.tensor([-2.0, 1.0]), torch.tensor([10.0, 3.0])
    small = AdaComp(2)
    assert small.select(residual + x).tolist() == [0, 1]
    assert small.select_feedback(x, residual, 0).size == 0
    assert residual.tolist() == [8.0, 4.0]


def test_an_active_bin_sends_more():
    quiet, active = torch.full((100,), 0.1), torch.full((100,), 0.9)
    quiet[0] = active[0] = 1.0
    assert AdaComp(100).select(quiet).size == 1
    assert AdaComp(100).select(active).size == 100


def test_the_papers_scale_is_the_mean_of_the_bins_maxima():
    x = torch.tensor([1.0, 0.2, -3.0, 2.0])
    small = AdaComp(2, "bins")
    assert small.decode(small.encode(x), 4).tolist() == [2.0, 0.0, -2.0, 2.0]
    assert AdaComp(2).decode(AdaComp(2).encode(x * torch.tensor([1, 1, 1, 0.9])), 4)[0] == pytest.approx(5.8 / 3)


@pytest.mark.parametrize(
    ("spec", "match"), [("adacomp(0)", "bin"), ("adacomp(2.5)", "bin"), ("adacomp(9, scale=max)", "scale")]
)
def test_parameters_out_of_range_are_refused(spec, match):
    with pytest.raises(BadInput, match=match):
        codec(spec)
