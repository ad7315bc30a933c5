"""The transforms of Winograd's minimal filtering F(m×m, r×r) as compiled kernels.

Callers: `winograd.py`. A tile of α = m + r − 1 input values a side gives m outputs a side:

    Y = Aᵀ [ (G g Gᵀ) ⊙ (Bᵀ d B) ] A

`matrices` builds Aᵀ, G, Bᵀ by Toom and Cook's interpolation at α − 1 points and infinity. The kernels hold Bᵀ and Aᵀ as
constants, which the compiler multiplies out; each works line by line, so that the vertical pass runs over contiguous
memory and only the horizontal one steps by m.

Tiles are counted in rows of tiles: row R of a batch is tile row R mod th of image R div th.
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from laconic.kernels import njit

Array = np.ndarray[Any, np.dtype[Any]]
Kernel = Callable[..., None]

# Mixing each point with its reciprocal of the other sign keeps the powers small: for 256 channels an error of 2.8e-6,
# where 0, ±1, ±2 give 8.0e-6 to 9.4e-6 on the same values. The idea is that of Barabasz et al., Error Analysis and
# Improving the Accuracy of Winograd Convolution for Deep Neural Networks, TOMS 2020.
_POINTS = {
    4: (0, 1, -1),
    6: (0, 1, -1, Fraction(1, 2), -2),
    8: (0, 1, -1, Fraction(1, 2), Fraction(-1, 2), 2, -2),
}


@cache
def matrices(m: int, r: int) -> tuple[Array, Array, Array]:
    """Aᵀ (m × α), G (α × r) and Bᵀ (α × α) in float64, α = m + r − 1.

    With points p₀ … p₍α₋₂₎ and ∞, and f_i = Π_{j≠i} (p_i − p_j): Aᵀ holds the powers of the points, G the same powers
    over f_i, and row i of Bᵀ the coefficients of Π_{j≠i} (x − p_j).
    """
    alpha = m + r - 1
    points = [Fraction(p) for p in _POINTS[alpha]]
    a = np.zeros((m, alpha))
    g = np.zeros((alpha, r))
    b = np.zeros((alpha, alpha))
    for i, p in enumerate(points):
        others = points[:i] + points[i + 1 :]
        f = Fraction(1)
        for q in others:
            f *= p - q
        a[:, i] = [float(p**k) for k in range(m)]
        g[i] = [float(p**k / f) for k in range(r)]
        b[i, : alpha - 1] = [float(c) for c in _monic(others)]
    a[m - 1, alpha - 1] = 1
    g[alpha - 1, r - 1] = 1
    b[alpha - 1] = [float(c) for c in _monic(points)]
    return a, g, b


def _monic(roots: list[Fraction]) -> list[Fraction]:
    """Coefficients of Π (x − root), lowest power first."""
    found = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *found]
        found = [s - root * c for s, c in zip(shifted, [*found, Fraction(0)], strict=True)]
    return found


@cache
def input_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (x, padding, first row, rows, tiles a row, v): Bᵀ d B of all tiles of some rows, into v[α², C, tiles]."""
    alpha = m + r - 1
    one, two, three, four, five = (np.uint64(i) for i in range(1, 6))
    bt = matrices(m, r)[2].astype(dtype)

    @njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
    def transform(x: Array, pad_y: int, pad_x: int, first: int, rows: int, th: int, tw: int, v: Array) -> None:
        height, width = x.shape[2], x.shape[3]
        wide = (tw - 1) * m + alpha
        line = np.zeros((alpha, wide + m), x.dtype)
        zeros = np.zeros(width, x.dtype)
        hi = min(width, wide - pad_x)
        for c in range(x.shape[1]):
            for row in range(rows):
                image, top = (first + row) // th, (first + row) % th * m - pad_y
                d = x[image, c]
                d0 = d[top] if 0 <= top < height else zeros
                d1 = d[top + 1] if 0 <= top + 1 < height else zeros
                d2 = d[top + 2] if 0 <= top + 2 < height else zeros
                d3 = d[top + 3] if 0 <= top + 3 < height else zeros
                d4 = d[top + 4] if alpha > 4 and 0 <= top + 4 < height else zeros
                d5 = d[top + 5] if alpha > 5 and 0 <= top + 5 < height else zeros
                d6 = d[top + 6] if alpha > 6 and 0 <= top + 6 < height else zeros
                d7 = d[top + 7] if alpha > 7 and 0 <= top + 7 < height else zeros
                for i in range(alpha):
                    out = line[i, pad_x:]
                    for at in range(np.uint64(hi)):
                        s = bt[i, 0] * d0[at] + bt[i, 1] * d1[at] + bt[i, 2] * d2[at] + bt[i, 3] * d3[at]
                        if alpha > 4:
                            s += bt[i, 4] * d4[at] + bt[i, 5] * d5[at]
                        if alpha > 6:
                            s += bt[i, 6] * d6[at] + bt[i, 7] * d7[at]
                        out[at] = s
                for i in range(alpha):
                    z = line[i]
                    for j in range(alpha):
                        w = v[i * alpha + j, c, row * tw : (row + 1) * tw]
                        for t in range(np.uint64(tw)):
                            q = t * np.uint64(m)
                            s = (
                                bt[j, 0] * z[q]
                                + bt[j, 1] * z[q + one]
                                + bt[j, 2] * z[q + two]
                                + bt[j, 3] * z[q + three]
                            )
                            if alpha > 4:
                                s += bt[j, 4] * z[q + four] + bt[j, 5] * z[q + five]
                            if alpha > 6:
                                s += bt[j, 6] * z[q + np.uint64(6)] + bt[j, 7] * z[q + np.uint64(7)]
                            w[t] = s

    return transform


@cache
def output_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (products[α², K, tiles], bias, first row, rows, tile rows, tiles a row, y): Aᵀ M A, into rows of y."""
    alpha = m + r - 1
    at_ = matrices(m, r)[0].astype(dtype)

    @njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
    def transform(q: Array, bias: Array, first: int, rows: int, th: int, tw: int, y: Array) -> None:
        height, width = y.shape[2], y.shape[3]
        line = np.empty((8, tw * m), y.dtype)
        z0, z1, z2, z3, z4, z5, z6, z7 = line[0], line[1], line[2], line[3], line[4], line[5], line[6], line[7]
        for k in range(y.shape[1]):
            b = bias[k]
            for row in range(rows):
                image, top = (first + row) // th, (first + row) % th * m
                lo, hi = row * tw, (row + 1) * tw
                for i in range(alpha):
                    z, base = line[i], i * alpha
                    q0, q1, q2 = q[base, k, lo:hi], q[base + 1, k, lo:hi], q[base + 2, k, lo:hi]
                    q3 = q[base + 3, k, lo:hi]
                    q4 = q[base + 4, k, lo:hi] if alpha > 4 else q3
                    q5 = q[base + 5, k, lo:hi] if alpha > 4 else q3
                    q6 = q[base + 6, k, lo:hi] if alpha > 6 else q3
                    q7 = q[base + 7, k, lo:hi] if alpha > 6 else q3
                    for t in range(np.uint64(tw)):
                        for j in range(np.uint64(m)):
                            s = at_[j, 0] * q0[t] + at_[j, 1] * q1[t] + at_[j, 2] * q2[t] + at_[j, 3] * q3[t]
                            if alpha > 4:
                                s += at_[j, 4] * q4[t] + at_[j, 5] * q5[t]
                            if alpha > 6:
                                s += at_[j, 6] * q6[t] + at_[j, 7] * q7[t]
                            z[t * np.uint64(m) + j] = s
                for i in range(min(m, height - top)):
                    out = y[image, k, top + i]
                    for x in range(np.uint64(width)):
                        s = b + at_[i, 0] * z0[x] + at_[i, 1] * z1[x] + at_[i, 2] * z2[x] + at_[i, 3] * z3[x]
                        if alpha > 4:
                            s += at_[i, 4] * z4[x] + at_[i, 5] * z5[x]
                        if alpha > 6:
                            s += at_[i, 6] * z6[x] + at_[i, 7] * z7[x]
                        out[x] = s

    return transform


@cache
def weight_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (w[K, C, r, r], u[α², K, C]): G g Gᵀ."""
    alpha = m + r - 1
    matrix = matrices(m, r)[1].astype(dtype)

    @njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
    def transform(w: Array, u: Array) -> None:
        channels = np.uint64(w.shape[1])
        flat = np.empty((r * r, w.shape[1]), w.dtype)
        half = np.empty((alpha * r, w.shape[1]), w.dtype)
        for k in range(w.shape[0]):
            for c in range(w.shape[1]):
                for i in range(r):
                    for j in range(r):
                        flat[i * r + j, c] = w[k, c, i, j]
            for i in range(alpha):
                for j in range(r):
                    out = half[i * r + j]
                    out[:] = 0
                    for p in range(r):
                        g, seen = matrix[i, p], flat[p * r + j]
                        if g != 0:
                            for c in range(channels):
                                out[c] += g * seen[c]
            for i in range(alpha):
                for j in range(alpha):
                    out = u[i * alpha + j, k]
                    out[:] = 0
                    for p in range(r):
                        g, seen = matrix[j, p], half[i * r + p]
                        if g != 0:
                            for c in range(channels):
                                out[c] += g * seen[c]

    return transform
