"""The loops of the robust rules over an (n, d) matrix of float32: one row a worker, n small, d large.

Callers: `rules.py`. Values are finite; nothing is checked here. Sums are float64 in a fixed order, without fused or
reordered operations, so that every worker gets the same bits on whatever processor it runs.
"""

from __future__ import annotations

from typing import Any, no_type_check

import numpy as np

from laconic.kernels import njit

Array = np.ndarray[Any, np.dtype[Any]]
BLOCK = 512  # columns sorted at once: 11 rows of them are 22 KiB, within the first cache
LANES = 16  # sums side by side, so that the processor adds several at once


@njit(nogil=True, cache=True)
@no_type_check
def finite_rows(x: Array) -> Array:
    """Which rows hold neither NaN nor infinity."""
    found = np.ones(x.shape[0], dtype=np.bool_)
    for i in range(x.shape[0]):
        for begin in range(0, x.shape[1], BLOCK):
            total = np.float32(0)
            for j in range(begin, min(begin + BLOCK, x.shape[1])):
                total += x[i, j] * np.float32(0)  # NaN for NaN and infinity, zero for the rest
            if total != 0:
                found[i] = False
                break
    return found


@njit(nogil=True, cache=True)
@no_type_check
def _sort_columns(x: Array, begin: int, width: int, block: Array) -> None:
    """Copy `width` columns into `block` and sort each, by odd-even exchanges that all columns make at once."""
    n = x.shape[0]
    for i in range(n):
        for j in range(width):
            block[i, j] = x[i, begin + j]
    for turn in range(n):
        for i in range(turn % 2, n - 1, 2):
            low, high = block[i], block[i + 1]
            for j in range(width):
                a, b = low[j], high[j]
                low[j] = a if a < b else b
                high[j] = b if a < b else a


@njit(nogil=True, cache=True)
@no_type_check
def middle_mean(x: Array, first: int, stop: int, out: Array) -> None:
    """out[j] = mean of the values number `first` to `stop` − 1 of column j in ascending order."""
    block = np.empty((x.shape[0], BLOCK), dtype=np.float32)
    total = np.empty(BLOCK, dtype=np.float64)
    for begin in range(0, x.shape[1], BLOCK):
        width = min(BLOCK, x.shape[1] - begin)
        _sort_columns(x, begin, width, block)
        total[:] = 0
        for i in range(first, stop):
            for j in range(width):
                total[j] += block[i, j]
        for j in range(width):
            out[begin + j] = np.float32(total[j] / (stop - first))


@njit(nogil=True, cache=True)
@no_type_check
def nearest_mean(x: Array, keep: int, out: Array) -> None:
    """out[j] = mean of the `keep` values of column j nearest to its median; of two as near, the smaller is kept."""
    n = x.shape[0]
    block = np.empty((n, BLOCK), dtype=np.float32)
    for begin in range(0, x.shape[1], BLOCK):
        width = min(BLOCK, x.shape[1] - begin)
        _sort_columns(x, begin, width, block)
        for j in range(width):
            middle = (np.float64(block[(n - 1) // 2, j]) + np.float64(block[n // 2, j])) / 2
            first, last = 0, n - 1
            while last - first + 1 > keep:
                if middle - block[first, j] > block[last, j] - middle:
                    first += 1
                else:
                    last -= 1
            total = 0.0
            for i in range(first, last + 1):
                total += block[i, j]
            out[begin + j] = np.float32(total / keep)


@njit(nogil=True, cache=True)
@no_type_check
def squared_distance(a: Array, b: Array) -> float:
    """‖a − b‖² of vectors of float32 or float64; the same bits for (b, a)."""
    lanes = np.zeros(LANES, dtype=np.float64)
    whole = a.size // LANES * LANES
    for begin in range(0, whole, LANES):
        for k in range(LANES):
            apart = np.float64(a[begin + k]) - np.float64(b[begin + k])
            lanes[k] += apart * apart
    total = 0.0
    for k in range(LANES):
        total += lanes[k]
    for j in range(whole, a.size):
        apart = np.float64(a[j]) - np.float64(b[j])
        total += apart * apart
    return total


@njit(nogil=True, cache=True)
@no_type_check
def pairwise(x: Array) -> Array:
    """Squared distances between all rows, (n, n) float64; columns by the thousand, which stay in the cache."""
    n = x.shape[0]
    found = np.zeros((n, n), dtype=np.float64)
    for begin in range(0, x.shape[1], 8 * BLOCK):
        stop = min(begin + 8 * BLOCK, x.shape[1])
        for i in range(n):
            for k in range(i):
                found[i, k] += squared_distance(x[i, begin:stop], x[k, begin:stop])
    for i in range(n):
        for k in range(i):
            found[k, i] = found[i, k]
    return found


@njit(nogil=True, cache=True)
@no_type_check
def weighted_sum(x: Array, weights: Array, out: Array) -> None:
    """out = Σᵢ weights[i] · x[i], in float64; rows of weight zero are not touched."""
    out[:] = 0
    for begin in range(0, x.shape[1], 8 * BLOCK):
        stop = min(begin + 8 * BLOCK, x.shape[1])
        for i in range(x.shape[0]):
            if weights[i] != 0:
                for j in range(begin, stop):
                    out[j] += weights[i] * np.float64(x[i, j])
