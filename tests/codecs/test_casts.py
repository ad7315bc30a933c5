"""Casts: every half value, overflow and NaN as documented, buffers at odd addresses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from subjects import same_bits

from laconic import codecs
from laconic.codecs import frame

CASTS = {"none": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
casts = pytest.mark.parametrize("name", CASTS)


@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_every_16_bit_value_decodes_and_adds_as_torch_converts_it(name):
    halves = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(CASTS[name])
    codec = codecs.codec(name)
    buffer = torch.empty(codec.max_nbytes(65536), dtype=torch.uint8)
    buffer[16:] = halves.view(torch.uint8)
    payload = frame.seal(buffer, name, 65536, buffer.numel())
    expected = halves.float()
    assert torch.equal(codec.decode(payload, 65536).nan_to_num(-7.0), expected.nan_to_num(-7.0))
    total = torch.full((65536,), 0.5)
    codec.decode_add(payload, total)
    assert torch.equal(total.nan_to_num(-7.0), (0.5 + expected).nan_to_num(-7.0))


@casts
def test_non_finite_values_are_carried_and_overflow_is_infinite(name):
    x = torch.tensor([1.0, float("nan"), float("inf"), float("-inf"), 3.4e38, -3.4e38, -0.0, 1e-45])
    decoded = codecs.codec(name).decode(codecs.codec(name).encode(x), 8)
    expected = x.to(CASTS[name]).float()
    assert torch.equal(decoded.isnan(), x.isnan())
    assert same_bits(decoded.nan_to_num(7.0), expected.nan_to_num(7.0))
    assert name == "none" or decoded[4] == float("inf")


def test_none_is_bit_exact_for_any_bits():
    bits = np.random.default_rng(0).integers(0, 2**32, 10_000, dtype=np.uint32)
    x = torch.from_numpy(bits.view(np.float32))
    assert same_bits(codecs.codec("none").decode(codecs.codec("none").encode(x), 10_000), x)


@casts
def test_buffers_at_odd_addresses_work(name):
    codec = codecs.codec(name)
    x = torch.randn(100, generator=torch.Generator().manual_seed(1))
    plain = codec.encode(x)
    room = torch.zeros(plain.numel() + 1, dtype=torch.uint8)
    shifted = codec.encode(x, out=room[1:])
    assert same_bits(shifted, plain)
    assert same_bits(codec.decode(shifted, 100), codec.decode(plain, 100))
    a, b = x.clone(), x.clone()
    codec.decode_add(shifted, a)
    codec.decode_add(plain, b)
    assert same_bits(a, b)
    a, b = x * 0.1, x * 0.1
    assert same_bits(codec.encode_feedback(x, a, out=room[1:]), codec.encode_feedback(x, b))
    assert same_bits(a, b)


@casts
def test_feedback_over_several_cache_blocks(name):
    codec = codecs.codec(name)
    x = torch.randn(200_001, generator=torch.Generator().manual_seed(2))
    residual = x.flip(0) * 0.01
    carried = residual + x
    payload = codec.encode_feedback(x, residual)
    assert same_bits(payload, codec.encode(carried))
    assert same_bits(residual, carried - codec.decode(payload, x.numel()))
