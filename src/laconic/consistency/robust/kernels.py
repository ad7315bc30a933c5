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


@njit(nogil=True, cache=True)
@no_type_check
def directions(x: Array, base: int) -> tuple[Array, Array]:
    """How far each row is from row `base`, and the cosines between the ways there, (n, n); 0 where a row is at it."""
    n = x.shape[0]
    inner = np.zeros((n, n), dtype=np.float64)
    for begin in range(0, x.shape[1], BLOCK):
        stop = min(begin + BLOCK, x.shape[1])
        for i in range(n):
            for k in range(i + 1):
                total = 0.0
                for j in range(begin, stop):
                    here = np.float64(x[base, j])
                    total += (np.float64(x[i, j]) - here) * (np.float64(x[k, j]) - here)
                inner[i, k] += total
    far = np.zeros(n, dtype=np.float64)
    for i in range(n):
        far[i] = np.sqrt(inner[i, i])
    for i in range(n):
        for k in range(i + 1):
            cosine = inner[i, k] / far[i] / far[k] if far[i] > 0 and far[k] > 0 else 0.0
            inner[i, k] = inner[k, i] = cosine
    return far, inner


@njit(nogil=True, cache=True)
@no_type_check
def is_median(far: Array, cosines: Array) -> bool:
    """Whether the others pull at row b by no more than there are rows at it (Vardi and Zhang)."""
    pull = np.where(far > 0.0, 1.0, 0.0)
    return _norm(cosines, pull) <= (far.size - pull.sum()) * (1.0 + 1e-9)


@njit(nogil=True, cache=True)
@no_type_check
def median_from(far: Array, cosines: Array) -> Array:
    """μ so that b + Σ μᵢ·(xᵢ − b)/‖xᵢ − b‖ is the geometric median of all rows, which row b, the best of them, is not.

    The median lies in the rows' affine hull, so lengths and angles are all that is needed. The sum of distances is
    smooth around it, and below that of every row. Newton's method with a line search finds it; a step that Newton
    cannot take is Weiszfeld's.
    """
    n = far.size
    found, pull = np.zeros(n, dtype=np.float64), np.where(far > 0.0, 1.0, 0.0)
    alike, strength = n - pull.sum(), _norm(cosines, pull)
    # Away from b, by a step that the sum of distances falls along (Vardi and Zhang).
    inverse = 0.0
    for i in range(n):
        if far[i] > 0.0:
            inverse += 1.0 / far[i]
    direction = pull / inverse * (1.0 - alike / strength)
    r = far
    for _ in range(200):
        step, better = 1.0, False
        for halving in range(80):
            if halving == 40 and found.any():  # Newton's direction does not lead down: Weiszfeld's does
                direction, step = _weiszfeld(far, found, r), 1.0
            there = found + step * direction
            r_there = _distances(far, cosines, there)
            if _change(far, cosines, found, step * direction, r, r_there) < 0.0:
                better = True
                break
            step /= 2
        if not better:
            return found
        found, r = there, r_there
        direction = _newton(far, cosines, found, r)
    return found


@njit(nogil=True, cache=True)
@no_type_check
def _norm(cosines: Array, along: Array) -> float:
    """‖Σ alongᵢ eᵢ‖ of unit vectors with these cosines."""
    total = 0.0
    for i in range(along.size):
        for j in range(along.size):
            total += along[i] * cosines[i, j] * along[j]
    return np.sqrt(max(total, 0.0))


@njit(nogil=True, cache=True)
@no_type_check
def _distances(far: Array, cosines: Array, along: Array) -> Array:
    """The distances of all rows to b + Σ alongᵢ eᵢ."""
    n = far.size
    shifted, out = np.empty(n, dtype=np.float64), np.empty(n, dtype=np.float64)
    for i in range(n):
        shifted[:] = along
        shifted[i] -= far[i]
        out[i] = max(_norm(cosines, shifted), 1e-300)
    return out


@njit(nogil=True, cache=True)
@no_type_check
def _change(far: Array, cosines: Array, along: Array, step: Array, r: Array, r_there: Array) -> float:
    """By how much a step changes the sum of distances: Σ (r'ᵢ² − rᵢ²)/(r'ᵢ + rᵢ).

    Beside a distant row a difference of two sums would be nothing but rounding.
    """
    n = far.size
    turned = np.zeros(n, dtype=np.float64)
    for i in range(n):
        for j in range(n):
            turned[i] += cosines[i, j] * step[j]
    ahead, squared, total = 0.0, 0.0, 0.0
    for i in range(n):
        ahead += turned[i] * along[i]
        squared += turned[i] * step[i]
    for i in range(n):
        total += (2.0 * (ahead - far[i] * turned[i]) + squared) / (r[i] + r_there[i])
    return total


@njit(nogil=True, cache=True)
@no_type_check
def _weiszfeld(far: Array, along: Array, r: Array) -> Array:
    """The way to the mean of the rows by 1/distance."""
    pulls = 1.0 / r
    return pulls * far / pulls.sum() - along


@njit(nogil=True, cache=True)
@no_type_check
def _newton(far: Array, cosines: Array, along: Array, r: Array) -> Array:
    """Newton's step −H⁻¹g, with g = Σ uᵢ, H = Σ (I − uᵢuᵢᵀ)/rᵢ and uᵢ the unit vector from row i to here.

    H δ = −g gives δ = (−g + Σ uⱼ aⱼ/rⱼ)/W with W = Σ 1/rⱼ and a = uᵀδ, so (W − U/r) a = −U·1 with U = uᵀu: a system
    as large as there are rows. Solved by elimination with pivots, in a fixed order.
    """
    n = far.size
    pulls = 1.0 / r
    strength = pulls.sum()
    ways = np.empty((n, n), dtype=np.float64)  # row i: uᵢ in the unit vectors from b
    for i in range(n):
        ways[i] = along * pulls[i]
        ways[i, i] -= far[i] * pulls[i]
    turned = np.zeros((n, n), dtype=np.float64)  # row i: the cosines times uᵢ
    for i in range(n):
        for k in range(n):
            for m in range(n):
                turned[i, k] += cosines[k, m] * ways[i, m]
    system = np.zeros((n, n + 1), dtype=np.float64)
    for i in range(n):
        for j in range(n):
            cosine = 0.0
            for k in range(n):
                cosine += ways[i, k] * turned[j, k]
            system[i, j] = -cosine * pulls[j]
            system[i, n] -= cosine
        system[i, i] += strength
    for column in range(n):
        best = column
        for i in range(column + 1, n):
            if abs(system[i, column]) > abs(system[best, column]):
                best = i
        if system[best, column] == 0.0:
            return _weiszfeld(far, along, r)
        for j in range(n + 1):
            system[column, j], system[best, j] = system[best, j], system[column, j]
        for i in range(column + 1, n):
            factor = system[i, column] / system[column, column]
            for j in range(column, n + 1):
                system[i, j] -= factor * system[column, j]
    solved = np.zeros(n, dtype=np.float64)
    for i in range(n - 1, -1, -1):
        rest = system[i, n]
        for j in range(i + 1, n):
            rest -= system[i, j] * solved[j]
        solved[i] = rest / system[i, i]
    step = np.zeros(n, dtype=np.float64)
    for j in range(n):
        for k in range(n):
            step[k] += (solved[j] * pulls[j] - 1.0) * ways[j, k] / strength
    return step
