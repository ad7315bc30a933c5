"""Robust rules straight from their formulas, for finite rows and an f that fits."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = np.ndarray[Any, np.dtype[Any]]


def mean(x: Array, f: int) -> Array:
    return np.mean(x.astype(np.float64), axis=0)


def median(x: Array, f: int) -> Array:
    return np.median(x.astype(np.float64), axis=0)


def trimmed_mean(x: Array, f: int) -> Array:
    ordered = np.sort(x.astype(np.float64), axis=0)
    return ordered[f : len(x) - f].mean(axis=0)


def scores(x: Array, f: int) -> Array:
    """Krum's: the sum of squared distances to the n − f − 2 nearest others (at least one, where there is one)."""
    n = len(x)
    x = x.astype(np.float64)
    found = []
    for i in range(n):
        apart = sorted(float(((x[i] - x[k]) ** 2).sum()) for k in range(n) if k != i)
        found.append(sum(apart[: max(n - f - 2, 1)]))
    return np.array(found)


def by_score(x: Array, f: int) -> list[int]:
    """The rows' numbers, best first; of equal scores (mutual nearest neighbours) the first by their bytes."""
    found = scores(x, f)
    return sorted(range(len(x)), key=lambda i: (found[i], x[i].tobytes()))


def krum(x: Array, f: int) -> Array:
    return x[by_score(x, f)[0]].astype(np.float64)


def multi_krum(x: Array, f: int) -> Array:
    best = by_score(x, f)[: len(x) - f - 2]
    return x[best].astype(np.float64).mean(axis=0)


def bulyan(x: Array, f: int) -> Array:
    left, chosen = list(range(len(x))), []
    while len(chosen) < len(x) - 2 * f:
        best = left[by_score(x[left], f)[0]]
        chosen.append(best)
        left.remove(best)
    picked = x[chosen].astype(np.float64)
    middle = np.median(picked, axis=0)
    out = np.empty(x.shape[1])
    for j in range(x.shape[1]):
        column = sorted(picked[:, j], key=lambda value, j=j: (abs(value - middle[j]), value))
        out[j] = np.mean(column[: len(x) - 4 * f])
    return out


def sum_of_distances(x: Array, y: Array) -> float:
    """What the geometric median makes smallest."""
    return float(np.sqrt(((x.astype(np.float64) - y) ** 2).sum(axis=1)).sum())


def geometric_median(x: Array, f: int) -> Array:
    """Many smoothed rounds of Weiszfeld's iteration, from the mean; or a row, where a row is better."""
    x = x.astype(np.float64)
    y = x.mean(axis=0)
    scale = np.abs(x - y).max() + 1e-30
    for _ in range(400):
        weights = 1 / np.maximum(np.sqrt(((x - y) ** 2).sum(axis=1)), 1e-12 * scale)
        y = (weights[:, None] * x).sum(axis=0) / weights.sum()
    return min([y, *x], key=lambda point: sum_of_distances(x, point))
