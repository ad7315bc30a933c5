"""Ranges cover everything once and are aligned; threads end with the call, also after an error."""

from __future__ import annotations

import threading

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from laconic.codecs import threads


@pytest.fixture
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@given(st.integers(0, 10**12), st.integers(1, 9), st.sampled_from([1, 8, 512, 4096]))
def test_ranges_cover_once_and_are_aligned(numel, parts, align):
    pieces = threads.ranges(numel, parts, align)
    assert len(pieces) <= parts
    assert [start for start, _ in pieces[1:]] == [stop for _, stop in pieces[:-1]]
    assert all(start < stop and start % align == 0 for start, stop in pieces)
    assert (pieces[0][0], pieces[-1][1]) == (0, numel) if numel else pieces == []


def test_short_input_is_one_plain_call(three_threads):
    calls = threads.run(lambda start, stop: (start, stop, threading.current_thread()), threads.MIN_NUMEL)
    assert calls == [(0, threads.MIN_NUMEL, threading.main_thread())]
    assert threads.run(lambda start, stop: (start, stop), 0) == [(0, 0)]


def test_long_input_runs_on_the_threads_of_torch_and_leaves_none(three_threads):
    meeting = threading.Barrier(3, timeout=10)  # all three must run at once to pass it

    def kernel(start, stop):
        meeting.wait()
        return start, stop

    assert threads.run(kernel, 10, align=2, min_numel=1) == [(0, 4), (4, 8), (8, 10)]
    assert not [t for t in threading.enumerate() if t.name.startswith("laconic-codec")]


def test_error_of_a_kernel_is_raised_after_all_have_ended(three_threads):
    ended = []

    def kernel(start, stop):
        if start == 0:
            raise RuntimeError("first")
        ended.append(start)

    with pytest.raises(RuntimeError, match="first"):
        threads.run(kernel, 9, min_numel=1)
    assert sorted(ended) == [3, 6]
