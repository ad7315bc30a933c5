"""The frame: what is sealed comes back, what was changed does not."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import frame
from laconic.codecs.base import Codec
from laconic.errors import BadInput, PayloadError
from reference import frame as reference


def sealed(body: bytes, name: str = "none", numel: int = 5) -> torch.Tensor:
    buffer = torch.zeros(frame.HEADER_NBYTES + len(body) + 7, dtype=torch.uint8)
    buffer[16 : 16 + len(body)] = torch.tensor(list(body), dtype=torch.uint8)
    return frame.seal(buffer, name, numel, frame.HEADER_NBYTES + len(body))


@dataclass(frozen=True)
class Fixed(Codec):
    """Two bytes per value; only its sizes are used."""

    def encode(self, x, *, step=0, out=None):
        raise NotImplementedError

    decode = decode_add = encode

    def max_nbytes(self, numel):
        return 16 + 2 * numel


@settings(max_examples=60)
@given(st.binary(max_size=70), st.integers(0, 2**40), st.sampled_from(["none", "qsgd", "topk+qsgd"]))
def test_sealed_bytes_match_the_reference_and_come_back(body, numel, name):
    payload = sealed(body, name, numel)
    assert np.array_equal(payload.numpy(), reference.payload(name, numel, body))
    assert frame.unseal(payload, name, numel, nbytes=16 + len(body)).tobytes() == body


def test_body_is_a_view():
    payload = sealed(b"abcd")
    assert frame.unseal(payload, "none", 5).ctypes.data == payload.data_ptr() + 16


def test_checksum_is_the_same_on_any_number_of_threads():
    payload = np.random.default_rng(0).integers(0, 256, 16 + 4 * 2_500_001 + 3, dtype=np.uint8)
    before = torch.get_num_threads()
    sums = []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            sums.append(frame._checksum(payload, frame._words(payload)))
    finally:
        torch.set_num_threads(before)
    assert sums == [reference.checksum(payload[:12].tobytes(), payload[16:].tobytes())] * 3


def test_unaligned_payload_is_read():
    payload = sealed(bytes(range(50)))
    shifted = torch.zeros(payload.numel() + 1, dtype=torch.uint8)
    shifted[1:] = payload
    assert frame.unseal(shifted[1:], "none", 5).tobytes() == bytes(range(50))


@pytest.mark.parametrize("length", [0, 1, 4, 5, 21])
def test_every_flipped_bit_is_caught(length):
    payload = sealed(bytes(np.random.default_rng(length).integers(0, 256, length, dtype=np.uint8)))
    for bit in range(8 * payload.numel()):
        bad = payload.clone()
        bad[bit // 8] ^= 1 << bit % 8
        with pytest.raises(PayloadError):
            frame.unseal(bad, "none", 5)


def test_swaps_double_flips_and_lost_zeros_are_caught():
    body = bytes(np.random.default_rng(1).integers(0, 256, 64, dtype=np.uint8)) + bytes(64)
    payload = sealed(body)
    bad_payloads = []
    for i in range(16):
        for j in range(i):
            swapped = bytearray(body)
            swapped[4 * i : 4 * i + 4], swapped[4 * j : 4 * j + 4] = body[4 * j : 4 * j + 4], body[4 * i : 4 * i + 4]
            flipped = bytearray(body)
            flipped[4 * i + 3] ^= 0x80  # two top bits: a plain sum would cancel
            flipped[4 * j + 3] ^= 0x80
            bad_payloads += [swapped, flipped]
    for cut in range(1, 64):
        bad_payloads += [body[:-cut], body + bytes(cut)]
    for bad in bad_payloads:
        forged = torch.cat([payload[:16], torch.tensor(list(bad), dtype=torch.uint8)])
        with pytest.raises(PayloadError, match="checksum"):
            frame.unseal(forged, "none", 5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda p: p[:15], "shorter than a 16-byte header"),
        (lambda p: p[:0], "shorter"),
        (lambda p: p[:-1], "has 23 bytes, not 24"),
        (lambda p: torch.cat([p, p]), "has 48 bytes, not 24"),
        (lambda p: p.float(), "1-D uint8"),
        (lambda p: p.reshape(2, 12), "1-D uint8"),
        (lambda p: p.numpy(), "got ndarray"),
        (lambda p: torch.cat([p[:1] + 1, p[1:]]), "not a Laconic payload"),
        (lambda p: torch.cat([p[:1], p[1:2] + 1, p[2:]]), "version 2"),
    ],
)
def test_bad_payload_says_why(change, message):
    with pytest.raises(PayloadError, match=message):
        frame.unseal(change(sealed(b"12345678")), "none", 5, nbytes=24)


def test_other_codec_and_other_numel_are_refused():
    with pytest.raises(PayloadError, match="another codec"):
        frame.unseal(sealed(b""), "fp16", 5)
    with pytest.raises(PayloadError, match="holds 5 values, 6"):
        frame.unseal(sealed(b""), "none", 6)


def test_buffers_are_checked():
    codec = Fixed()
    assert frame.buffer_for(codec, 3, None).shape == (22,)
    out = torch.empty(30, dtype=torch.uint8)
    assert frame.buffer_for(codec, 3, out) is out
    for bad in (torch.empty(21, dtype=torch.uint8), torch.empty(30), out.reshape(3, 10), torch.empty(60).byte()[::2]):
        with pytest.raises(BadInput):
            frame.buffer_for(codec, 3, bad)
    values = torch.empty(3)
    assert frame.values_for(codec, 3, values) is values
    assert frame.values_for(codec, 0, None).shape == (0,)
    for numel, bad in [(-1, None), (4, values), (3, values.double())]:
        with pytest.raises(BadInput):
            frame.values_for(codec, numel, bad)
    assert frame.floats(torch.ones(2, requires_grad=True), codec).tolist() == [1.0, 1.0]
    with pytest.raises(BadInput, match="CPU"):
        frame.floats(torch.empty(2, device="meta"), codec)
