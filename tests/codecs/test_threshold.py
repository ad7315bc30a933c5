"""threshold beyond the shared laws."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic.codecs import codec
from laconic.codecs.threshold import Threshold
from laconic.errors import BadInput, PayloadError


def test_the_threshold_itself_is_not_sent_and_the_next_float_is():
    t = np.float32(0.3)
    x = torch.tensor([t, -t, np.nextafter(t, np.float32(1)), -np.nextafter(t, np.float32(1)), 0.0])
    assert Threshold(0.3).select(x).tolist() == [2, 3]


def test_feedback_sends_a_large_value_in_several_steps():
    """Strom: what exceeds the threshold stays and is sent later."""
    small, residual, sent = Threshold(1.0), torch.zeros(3), torch.zeros(3)
    for x in (torch.tensor([3.5, -0.6, 0.2]), *[torch.zeros(3)] * 5):
        small.decode_add(small.encode_feedback(x, residual), sent)
    assert sent.tolist() == [3.0, 0.0, 0.0]
    assert residual.tolist() == pytest.approx([0.5, -0.6, 0.2])


def test_composed_with_none_it_sends_the_values():
    x = torch.tensor([3.5, -0.6, -7.25])
    both = codec("threshold(1.0)+none")
    assert both.decode(both.encode(x), 3).tolist() == [3.5, 0.0, -7.25]


def test_a_payload_of_another_threshold_is_refused():
    payload = Threshold(0.5).encode(torch.ones(10))
    with pytest.raises(PayloadError, match=r"with threshold 0\.5"):
        Threshold(0.25).decode(payload, 10)


def test_every_element_selected_fits_max_nbytes():
    small = Threshold(0.5)
    assert small.encode(torch.ones(1001)).numel() == small.max_nbytes(1001)


@pytest.mark.parametrize("t", ["0", "-1", "nan", "inf", "1e39", "1e-60", "true", "x"])
def test_thresholds_out_of_range_are_refused(t):
    with pytest.raises(BadInput, match="threshold: t must be"):
        codec(f"threshold({t})")
