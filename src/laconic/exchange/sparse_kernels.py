"""Loops over the (index, value) pairs of sparse streams, compiled and without the interpreter's lock.

Callers: `sparse_stream.py`. Indices are int64, sorted and distinct; values float32. Nothing is checked here.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np
from numba import njit

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
    outcome of two comparisons: no branch depends on the data, which random patterns would mispredict every other time.
    """
    i, j, count = 0, 0, 0
    while i < low_indices.size and j < high_indices.size:
        x, y = low_indices[i], high_indices[j]
        a, b = low_values[i], high_values[j]
        indices[count] = min(x, y)
        values[count] = a if x < y else (b if y < x else a + b)
        i += x <= y
        j += y <= x
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
