"""Packed indices: the reference's bytes, the stated size, and nothing but increasing indices accepted."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from laconic.codecs import indices
from laconic.errors import PayloadError
from reference import index_packing

few = settings(max_examples=150)


@st.composite
def chosen(draw):
    """(numel, sorted distinct indices): dense and sparse, clustered at either end."""
    numel = draw(st.integers(1, 3000))
    count = draw(st.one_of(st.integers(0, min(numel, 12)), st.integers(0, numel)))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    how = draw(st.sampled_from(["anywhere", "first", "last"]))
    if how == "anywhere":
        return numel, np.sort(rng.choice(numel, count, replace=False)).astype(np.int64)
    return numel, np.arange(count, dtype=np.int64) + (0 if how == "first" else numel - count)


def packed(numel, array):
    section = np.full(indices.nbytes(numel, array.size), 0xA5, np.uint8)
    indices.pack(array, numel, section)
    return section


@few
@given(case=chosen())
@example(case=(1, np.array([0])))
@example(case=(2**20, np.array([2**20 - 1])))
def test_bytes_are_the_references_and_come_back(case):
    numel, array = case
    section = packed(numel, array)
    assert section.tobytes() == index_packing.pack(array.tolist(), numel)
    assert index_packing.unpack(section.tobytes(), numel, array.size) == array.tolist()
    assert np.array_equal(indices.unpack(section, numel, array.size), array)


@few
@given(numel=st.integers(1, 2**40), data=st.data())
def test_size_is_within_the_stated_bound(numel, data):
    count = data.draw(st.integers(1, numel))
    bits = 8 * indices.nbytes(numel, count)
    assert bits <= numel + 7
    assert bits <= count * (2 + math.log2(numel / count)) + 16


def test_size_grows_up_to_each_peak_and_only_there_may_drop():
    """For every numel to 2000 and every limit on the count: the largest size is that of a peak."""
    for numel in range(1, 2001):
        sizes = [indices.nbytes(numel, count) for count in range(numel + 1)]
        peaks = indices.peaks(numel, numel)
        assert all(sizes[c] >= sizes[c - 1] or c - 1 in peaks for c in range(1, numel + 1))
        largest = 0
        for most, size in enumerate(sizes):
            largest = max(largest, size)
            if numel < 200 or most % 37 == 0 or most in peaks:
                assert max(sizes[c] for c in indices.peaks(numel, most)) == largest
    assert indices.nbytes(160, 5) > indices.nbytes(160, 6)


@few
@given(numel=st.integers(0, 2**40), data=st.data())
def test_no_count_takes_more_than_the_peaks(numel, data):
    most = data.draw(st.integers(0, numel))
    count = data.draw(st.integers(0, most))
    peaks = indices.peaks(numel, most)
    assert max(peaks) == most
    assert len(peaks) <= 42
    assert indices.nbytes(numel, count) <= max(indices.nbytes(numel, peak) for peak in peaks)


@pytest.mark.parametrize(("share", "bits"), [(0.1, 5.25), (0.01, 8.56), (0.001, 11.95)])
def test_documented_bits_per_index(share, bits):
    numel = 1 << 24
    count = round(share * numel)
    assert 8 * indices.nbytes(numel, count) / count == pytest.approx(bits, abs=0.01)


def test_indices_beyond_32_bits():
    numel = 2**40
    array = np.array([0, 2**31, 2**32 + 5, 2**40 - 1])
    assert indices.unpack(packed(numel, array), numel, 4).tolist() == array.tolist()


@few
@given(case=chosen(), data=st.data())
def test_any_bytes_give_increasing_indices_or_payload_error(case, data):
    numel, array = case
    section = packed(numel, array)
    for _ in range(3):
        if section.size:
            section[data.draw(st.integers(0, section.size - 1))] ^= data.draw(st.integers(1, 255))
    try:
        found = indices.unpack(section, numel, array.size)
    except PayloadError:
        return
    assert found.size == array.size
    assert found.size == 0 or (found[0] >= 0 and found[-1] < numel and (np.diff(found) > 0).all())


@pytest.mark.parametrize(
    ("numel", "count", "section", "match"),
    [
        (10, 11, np.zeros(2, np.uint8), "cannot be selected"),
        (10, -1, np.zeros(2, np.uint8), "cannot be selected"),
        (1000, 10, np.zeros(11, np.uint8), "take 12 bytes, got 11"),
        (1000, 10, np.zeros(12, np.uint8), "does not hold 10"),
        (1000, 10, np.full(12, 255, np.uint8), "does not hold 10"),
        (10, 9, np.full(2, 255, np.uint8), "does not hold 9"),
    ],
)
def test_sections_that_are_not_of_that_count_are_refused(numel, count, section, match):
    with pytest.raises(PayloadError, match=match):
        indices.unpack(section, numel, count)


def test_an_index_past_the_end_is_refused():
    """The unary part has room for a high part whose low bits lead past numel."""
    section = packed(100, np.array([2, 50, 99]))
    section[:2] = 255  # all low bits set: 99 becomes 111
    with pytest.raises(PayloadError, match="below 100"):
        indices.unpack(section, 100, 3)
