"""The division of a batch is the best there is, and the policies are what they say."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from laconic.errors import BadInput, UnknownName
from laconic.operators.micro_batch import divide, sizes


def best_by_trying_all(batch, seconds):
    """Every multiset of sizes that sums up to the batch."""
    found = float("inf")
    for count in range(1, batch + 1):
        for pieces in itertools.combinations_with_replacement(seconds, count):
            if sum(pieces) == batch:
                found = min(found, sum(seconds[piece] for piece in pieces))
    return found


@given(batch=st.integers(1, 8), seconds=st.dictionaries(st.integers(1, 8), st.floats(0.01, 10), min_size=1, max_size=4))
def test_a_division_is_the_quickest(batch, seconds):
    wanted = best_by_trying_all(batch, seconds)
    if wanted == float("inf"):
        with pytest.raises(BadInput, match="make up"):
            divide(batch, seconds)
        return
    pieces, time = divide(batch, seconds)
    assert sum(pieces) == batch
    assert sum(seconds[piece] for piece in pieces) == pytest.approx(time)
    assert time == pytest.approx(wanted)


def test_policies():
    assert sizes("undivided", 6) == [6]
    assert sizes("powers", 6) == [1, 2, 4, 6]
    assert sizes("all", 3) == [1, 2, 3]
    with pytest.raises(UnknownName, match="did you mean 'powers'"):
        sizes("power", 3)
