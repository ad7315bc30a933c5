"""Huffman coding beyond the shared laws: the reference's bytes, optimal lengths, and nothing read out of bounds."""

from __future__ import annotations

import heapq

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.codecs import codec, huffman
from laconic.errors import BadInput, PayloadError
from reference import codec_entropy

few = settings(max_examples=60)


@st.composite
def symbols(draw):
    """Bytes of several characters: constant, skewed, uniform, planes that differ."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    numel = draw(st.one_of(st.integers(0, 40), st.integers(0, 6000)))
    kind = draw(st.sampled_from(["constant", "skewed", "steep", "uniform", "floats", "two"]))
    if kind == "constant":
        return np.full(numel, rng.integers(256), np.uint8)
    if kind == "skewed":
        return np.minimum(rng.geometric(0.2, numel), 255).astype(np.uint8)
    if kind == "steep":  # counts that double: unlimited codes would be longer than 11 bits
        return np.minimum(rng.geometric(0.5, numel) * 7, 255).astype(np.uint8)
    if kind == "floats":
        return np.resize(rng.standard_normal(numel // 4 + 1).astype(np.float32).view(np.uint8), numel)
    return rng.integers(0, 2 if kind == "two" else 256, numel).astype(np.uint8)


def compressed(data):
    room = np.empty(data.size + 8, np.uint8)
    return room[: huffman.compress(data, room)]


@few
@given(data=symbols())
def test_bytes_are_the_references_and_come_back(data):
    body = compressed(data)
    assert body.tobytes() == codec_entropy.compress(data.tobytes())
    assert body.size <= data.size + 8
    assert huffman.decompress(body, data.size).tobytes() == data.tobytes()
    assert codec_entropy.decompress(body.tobytes()) == data.tobytes()


@few
@given(counts=st.lists(st.integers(0, 2**20), min_size=256, max_size=256), limit=st.integers(8, 11))
def test_code_lengths_are_a_complete_code_within_the_limit(counts, limit):
    lengths = huffman.code_lengths(np.array(counts), limit)
    assert lengths.tolist() == codec_entropy.code_lengths(counts, limit)
    used = lengths[lengths > 0].astype(int)
    assert used.size == np.count_nonzero(counts)
    assert used.max(initial=0) <= limit
    assert used.size < 2 or sum(2 ** (limit - used)) == 2**limit


def test_lengths_are_huffmans_where_the_limit_does_not_bind():
    counts = np.zeros(256, np.int64)
    counts[[65, 66, 67, 68, 69, 70]] = [45, 13, 12, 16, 9, 5]
    assert huffman.code_lengths(counts, 11)[65:71].tolist() == [1, 3, 3, 3, 4, 4]


def test_a_limit_that_binds_costs_little():
    """Fibonacci counts are Huffman's worst case: 25 symbols want more than 11 bits."""
    counts = np.zeros(256, np.int64)
    counts[:2] = 1
    for i in range(2, 25):
        counts[i] = counts[i - 1] + counts[i - 2]
    lengths = huffman.code_lengths(counts, 11)
    heap, unlimited = counts[:25].tolist(), 0
    heapq.heapify(heap)
    while len(heap) > 1:  # Huffman's algorithm: merging the two rarest adds a bit to all that they hold
        merged = heapq.heappop(heap) + heapq.heappop(heap)
        unlimited += merged
        heapq.heappush(heap, merged)
    assert lengths.max() == 11
    assert unlimited < (counts * lengths).sum() < 1.01 * unlimited


def test_floats_are_coded_by_plane():
    """Three bytes of a float32 are noise; the one with the exponent is not, and has a table of its own."""
    x = torch.from_numpy(np.random.default_rng(0).standard_normal(100_000).astype(np.float32))
    payload = codec("entropy").encode(x)
    assert payload[16 + 7] == 2
    assert payload.numel() < 0.92 * 4 * x.numel()


def test_skewed_payloads_shrink_and_random_ones_stay():
    x = torch.zeros(200_000)
    x[::50] = 1.0
    assert codec("fp16+entropy").encode(x).numel() < 0.16 * codec("fp16").encode(x).numel()
    noise = torch.from_numpy(np.random.default_rng(0).standard_normal(4096).astype(np.float32))
    assert codec("onebit+entropy").encode(noise).numel() <= codec("onebit").encode(noise).numel() + 8


@few
@given(data=symbols(), where=st.data())
def test_any_bytes_give_symbols_or_payload_error(data, where):
    body = compressed(data).copy()
    for _ in range(where.draw(st.integers(1, 4))):
        body[where.draw(st.integers(0, body.size - 1))] = where.draw(st.integers(0, 255))
    cut = body[: where.draw(st.integers(0, body.size))]
    for damaged in (body, cut):
        try:
            found = huffman.decompress(damaged, data.size)
        except PayloadError:
            continue
        assert found.size <= data.size


def test_a_table_that_is_no_code_is_refused():
    body = compressed(np.zeros(1000, np.uint8)).copy()
    body[8:136] = 0x11  # 256 codes of one bit
    with pytest.raises(PayloadError, match="code lengths"):
        huffman.decompress(body, 1000)
    body[8:136] = 0xFF  # 15 bits
    with pytest.raises(PayloadError, match="code lengths"):
        huffman.decompress(body, 1000)
    body[8:136] = 0  # no code at all
    with pytest.raises(PayloadError, match="do not hold"):
        huffman.decompress(body, 1000)


def test_bits_that_are_no_code_are_refused():
    """One symbol has the code 0, so a 1 means nothing, here in a word that is read anyway."""
    body = compressed(np.zeros(1000, np.uint8)).copy()
    body[-2] ^= 1
    with pytest.raises(PayloadError, match="do not hold"):
        huffman.decompress(body, 1000)


def test_a_stream_of_another_length_is_refused():
    body = compressed(np.zeros(1000, np.uint8)).copy()
    body[0] ^= 0x80  # 1000 symbols become 872, each stream a word longer than it needs
    with pytest.raises(PayloadError, match="do not hold 872"):
        huffman.decompress(body, 1000)


def test_more_symbols_than_the_inner_codec_can_have_are_refused():
    body = compressed(np.zeros(1000, np.uint8))
    with pytest.raises(PayloadError, match="at most 999"):
        huffman.decompress(body, 999)


@pytest.mark.parametrize("spec", ["entropy+entropy", "entropy(3)", "powersgd+entropy", "entropy+fp16"])
def test_what_cannot_be_coded_is_refused(spec):
    with pytest.raises(BadInput, match="entropy"):
        codec(spec)
