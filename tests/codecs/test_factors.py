"""factors: what autograd computes, from what travels."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import codec
from laconic.codecs.factors import Factors
from laconic.errors import BadInput, NonFiniteError, PayloadError
from reference import codec_factors

few = settings(max_examples=40)


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape).astype(np.float32))


@pytest.mark.parametrize(("batch", "c_in", "c_out"), [(1, 1, 1), (8, 30, 20), (32, 64, 10)])
def test_product_is_autograds_weight_gradient(batch, c_in, c_out):
    torch.manual_seed(0)
    layer = torch.nn.Linear(c_in, c_out)
    seen = {}
    layer.register_forward_hook(lambda module, inputs, output: seen.update(o=inputs[0], y=output))
    loss = torch.tanh(layer(normal(batch, c_in))).square().sum()
    seen["y"].retain_grad()
    loss.backward()
    gradient = torch.zeros(c_out, c_in)
    Factors().unpack_add(Factors().pack(seen["o"], seen["y"].grad), gradient)
    assert torch.allclose(gradient, layer.weight.grad, rtol=1e-5, atol=1e-6)


@few
@given(batch=st.integers(0, 9), c_in=st.integers(1, 20), c_out=st.integers(1, 20), seed=st.integers(0, 1000))
def test_payload_comes_back_and_adds(batch, c_in, c_out, seed):
    o, delta = normal(batch, c_in, seed=seed), normal(batch, c_out, seed=seed + 1)
    payload = Factors().pack(o, delta)
    assert payload[16:].numpy().tobytes() == codec_factors.pack_body(o.numpy(), delta.numpy())
    assert payload.numel() == 32 + 4 * Factors().floats_sent((c_out, c_in), batch)
    back = Factors().unpack(payload, (c_out, c_in))
    assert torch.equal(back[0], o)
    assert torch.equal(back[1], delta)
    total = normal(c_out, c_in, seed=seed + 2)
    expected = total.numpy() + codec_factors.weight_gradient(o.numpy(), delta.numpy())
    Factors().unpack_add(payload, total)
    assert np.allclose(total.numpy(), expected, atol=1e-4)


def test_transposed_input_is_packed_by_rows():
    o, delta = normal(5, 3).T, normal(3, 2)
    assert torch.equal(Factors().unpack(Factors().pack(o, delta), (2, 5))[0], o)


@few
@given(data=st.data())
def test_damaged_payloads_are_refused_and_the_gradient_untouched(data):
    payload = Factors().pack(normal(4, 5), normal(4, 3))
    bit = data.draw(st.integers(0, 8 * payload.numel() - 1))
    flipped = payload.clone()
    flipped[bit // 8] ^= 1 << bit % 8
    cut = payload[: data.draw(st.integers(0, payload.numel() - 1))]
    for bad in (flipped, cut, torch.cat([payload, payload[:4]])):
        gradient = torch.ones(3, 5)
        with pytest.raises(PayloadError):
            Factors().unpack_add(bad, gradient)
        assert torch.equal(gradient, torch.ones(3, 5))


def test_sizes_that_lie_under_a_valid_checksum_are_refused():
    from laconic.codecs import frame

    for sizes in ([4, 3, 5, 0], [0xFFFFFFFF, 5, 3, 0], [3, 5, 3, 0], [4, 5, 3, 1]):
        payload = Factors().pack(normal(4, 5), normal(4, 3)).clone()
        payload[16:32] = torch.from_numpy(np.array(sizes, "<u4").view(np.uint8).copy())
        with pytest.raises(PayloadError, match="batch of"):
            Factors().unpack(frame.seal(payload, "factors", 32, payload.numel()), (3, 5))


def test_payload_of_another_layer_is_refused():
    with pytest.raises(PayloadError, match=r"\(3, 5\)"):
        Factors().unpack(Factors().pack(normal(4, 5), normal(4, 3)), (5, 3))


def test_pays_where_it_moves_fewer_floats():
    """Count both, for every rank: all-gather of the factors against reduce-scatter and all-gather of the gradient."""
    for world_size in (2, 3, 8):
        for batch in (1, 16, 64, 500):
            for c_in, c_out in ((4096, 4096), (100, 10), (9216, 4096)):
                factors = (world_size - 1) * batch * (c_in + c_out)
                gradient = 2 * (world_size - 1) / world_size * c_in * c_out
                assert Factors().pays(batch, c_in, c_out, world_size) == (factors < gradient)
    with pytest.raises(BadInput, match="at least 1"):
        Factors().pays(0, 1, 1, 1)


def test_exact_is_unbiased():
    assert codec("factors").unbiased


def test_bad_input_is_refused():
    factors = codec("factors")
    with pytest.raises(BadInput, match="flat vectors"):
        factors.encode(torch.zeros(4))
    with pytest.raises(BadInput, match="δ must be"):
        factors.pack(normal(4, 5), normal(3, 3))
    with pytest.raises(BadInput, match="o must be"):
        factors.pack(normal(4), normal(4, 3))
    with pytest.raises(NonFiniteError):
        factors.pack(normal(4, 5) / 0, normal(4, 3))
