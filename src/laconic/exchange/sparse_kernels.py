"""Loops over the (index, value) pairs of sparse streams, compiled and without the interpreter's lock.

Callers: `sparse_stream.py`. Indices are int64, sorted and distinct; values float32. Nothing is checked here.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np

from laconic.kernels import njit

Array = np.ndarray[Any, np.dtype[Any]]


@njit(nogil=True, cache=True)
@no_type_check
def is_increasing(indices: Array, numel: int) -> bool:
    """Whether 0 ≤ indices[0] < indices[1] < … < numel."""
    previous = np.int64(-1)
    good = True
    for j in range(indices.size):
        good &= indices[j] > previous
        previous = np.int64(indices[j])
    return good and previous < numel


@njit(nogil=True, cache=True)
@no_type_check
def merge_pairs(
    low_indices: Array, low_values: Array, high_indices: Array, high_values: Array, indices: Array, values: Array
) -> int:
    """Write the union of two streams, low + high where both have an index; returns how many pairs it has.

    `indices` and `values` have room for both. Every step writes one pair and moves one or both readers on by the
    outcome of two comparisons. No branch depends on the data, which random patterns would mispredict every other time:
    who has no value to add takes −0, which changes no number, from a table, since a conditional value becomes a branch
    (7 instead of 3 ns per pair at 1 %, 16 instead of 6 at 10 %).
    """
    low, high = np.full(2, np.float32(-0.0)), np.full(2, np.float32(-0.0))
    i, j, count = 0, 0, 0
    while i < low_indices.size and j < high_indices.size:
        x, y = low_indices[i], high_indices[j]
        from_low, from_high = np.int64(x <= y), np.int64(y <= x)
        low[1], high[1] = low_values[i], high_values[j]
        indices[count] = y ^ ((x ^ y) & -from_low)
        values[count] = low[from_low] + high[from_high]
        i += from_low
        j += from_high
        count += 1
    while i < low_indices.size:
        indices[count] = low_indices[i]
        values[count] = low_values[i]
        i += 1
        count += 1
    while j < high_indices.size:
        indices[count] = high_indices[j]
        values[count] = high_values[j]
        j += 1
        count += 1
    return count


@njit(nogil=True, cache=True)
@no_type_check
def add_pairs(dense: Array, indices: Array, values: Array) -> None:
    """dense[indices] += values."""
    for j in range(indices.size):
        dense[indices[j]] += values[j]


@njit(nogil=True, cache=True)
@no_type_check
def put_pairs(dense: Array, indices: Array, values: Array) -> None:
    """dense[indices] = values."""
    for j in range(indices.size):
        dense[indices[j]] = values[j]
