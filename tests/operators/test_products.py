"""Products whose sums stay in registers equal NumPy's, for every size of tile, and write nothing beside them."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.operators.products import add_transposed, multiply, multiply_lines, panels, row
from laconic.operators.vectors import ROWS, lanes, padded

GUARD = 77.0
sizes = st.tuples(st.integers(1, 2 * ROWS + 3), st.integers(1, 40), st.integers(1, 70))
each_type = pytest.mark.parametrize("dtype", ["float32", "float64"])


def values(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Small whole numbers, whose products and sums are exact."""
    return np.random.default_rng(shape).integers(-8, 9, shape).astype(dtype)


def guarded(shape: tuple[int, ...], dtype: str) -> np.ndarray:
    """Memory of a shape in the middle of values that must stay."""
    return np.full((shape[0] + 2, *shape[1:]), GUARD, dtype)


def assert_guarded(whole: np.ndarray) -> None:
    assert np.all(whole[0] == GUARD)
    assert np.all(whole[-1] == GUARD)


@each_type
@settings(max_examples=25)
@given(size=sizes)
def test_panels(dtype, size):
    rows, depth, columns = size[0], size[1], padded(size[2], dtype)
    a, b = values((2, rows, row(depth, dtype)), dtype), values((2, depth, columns), dtype)
    cut = np.stack([panels(torch.from_numpy(each), dtype).numpy().ravel() for each in b])
    whole = guarded((2, rows, columns), dtype)
    multiply(dtype)(a, cut, whole[1:-1], depth, columns)
    np.testing.assert_array_equal(whole[1:-1], a[:, :, :depth] @ b)
    assert_guarded(whole)


@each_type
@settings(max_examples=25)
@given(size=sizes)
def test_transposed_and_added(dtype, size):
    rows, depth, columns = size[0], size[1], padded(size[2], dtype)
    a, b = values((2, depth, rows + 3), dtype), values((2, depth, columns), dtype)
    whole, wanted = guarded((2, rows, columns), dtype), a[:, :, :rows].transpose(0, 2, 1) @ b
    for add in (0, 1):
        add_transposed(dtype)(a, b, whole[1:-1], add)
        np.testing.assert_array_equal(whole[1:-1], (1 + add) * wanted)
    assert_guarded(whole)


@each_type
@settings(max_examples=25)
@given(size=sizes)
def test_lines_of_any_length(dtype, size):
    rows, depth, columns = size[0], size[1], size[2] + lanes(dtype) - 1
    a, b = values((rows, row(depth, dtype)), dtype), values((depth, columns), dtype)
    whole = guarded((rows, columns), dtype)
    multiply_lines(dtype)(a, b, whole[1:-1])
    np.testing.assert_array_equal(whole[1:-1], a[:, :depth] @ b)
    assert_guarded(whole)


@each_type
def test_lines_that_are_too_much_for_the_cache(dtype):
    a, b = values((ROWS + 1, 700), dtype), values((700, 300), dtype)
    found = np.empty((ROWS + 1, 300), dtype)
    multiply_lines(dtype)(a, b, found)
    np.testing.assert_array_equal(found, a @ b)


def test_rows_do_not_share_their_places_in_the_cache():
    assert (row(64, "float32") % lanes("float32"), row(5, "float32")) == (0, lanes("float32"))
    assert all(row(n, "float32") >= n and row(n, "float32") * 4 % 1024 for n in range(1, 3000, 7))
