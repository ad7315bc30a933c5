"""Winograd's transforms as compiled loops, and the matrices they follow from.

Callers: `winograd.py`. In all of them vectors run over channels: images are fetched row by row into lines of pixels
with their channels side by side, whatever their order in memory, and results are stored from such lines.

    tiles_transform    Bᵀ d B of overlapping tiles of an image, and A e Aᵀ of the tiles of a gradient
    output_transform   Aᵀ M A, into the rows of an image
    weight_transform   G g Gᵀ, and weight_gradient its adjoint, Gᵀ U G
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from laconic.kernels import Array, njit

Kernel = Callable[..., None]

# Mixing each point with its reciprocal of the other sign keeps the powers small: for 256 channels an error of 2.8e-6,
# where 0, ±1, ±2 give 8.0e-6 to 9.4e-6 on the same values. The idea is that of Barabasz et al., Error Analysis and
# Improving the Accuracy of Winograd Convolution for Deep Neural Networks, TOMS 2020.
_POINTS = {
    4: (0, 1, -1),
    6: (0, 1, -1, Fraction(1, 2), -2),
    8: (0, 1, -1, Fraction(1, 2), Fraction(-1, 2), 2, -2),
}
_PIXELS = 16  # fetched and stored at a time where channels lie apart, so that what is transposed stays in cache
_FILTERS = 8  # read at a time: those of neighbouring input channels lie side by side
_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "fastmath": True, "error_model": "numpy"}


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


def _combination(matrix: Array, dtype: str) -> Kernel:
    """Kernel (i, x, start, apart, count, y, at): y[at + c] = Σ_p matrix[i, p] · x[start + p·apart + c], c < count."""
    taps, rows = matrix.shape[1], matrix.astype(dtype)

    @njit(**_OPTIONS)
    def combine(i: int, x: Array, start: int, apart: int, count: int, y: Array, at: int) -> None:
        x0, x1, out = x[start:], x[start + apart :], y[at:]
        x2 = x[start + 2 * apart :] if taps > 2 else x0
        x3 = x[start + 3 * apart :] if taps > 3 else x0
        x4 = x[start + 4 * apart :] if taps > 4 else x0
        x5 = x[start + 5 * apart :] if taps > 5 else x0
        x6 = x[start + 6 * apart :] if taps > 6 else x0
        x7 = x[start + 7 * apart :] if taps > 7 else x0
        for c in range(np.uint64(count)):
            s = rows[i, 0] * x0[c] + rows[i, 1] * x1[c]
            if taps > 2:
                s += rows[i, 2] * x2[c]
            if taps > 3:
                s += rows[i, 3] * x3[c]
            if taps > 4:
                s += rows[i, 4] * x4[c]
            if taps > 5:
                s += rows[i, 5] * x5[c]
            if taps > 6:
                s += rows[i, 6] * x6[c]
            if taps > 7:
                s += rows[i, 7] * x7[c]
            out[c] = s

    return combine


@njit(**_OPTIONS)
def _fetch(x: Array, last: bool, image: int, row: int, pad: int, line: Array) -> None:
    """A row of an image, [C, H, W] or with channels last [H, W, C], into line[pixels, C]; zeros beside it."""
    height, width = (x.shape[1], x.shape[2]) if last else (x.shape[2], x.shape[3])
    if row < 0 or row >= height:
        line[:] = 0
        return
    end = min(width, line.shape[0] - pad)
    line[:pad] = 0
    line[pad + end :] = 0
    if last:
        line[pad : pad + end] = x[image, row, :end]
        return
    for lo in range(0, end, _PIXELS):
        pixels = np.uint64(min(_PIXELS, end - lo))
        for c in range(x.shape[1]):
            seen = x[image, c, row, lo:]
            for at in range(pixels):
                line[np.uint64(pad + lo) + at, c] = seen[at]


@njit(**_OPTIONS)
def _store(line: Array, bias: Array, last: bool, image: int, row: int, y: Array) -> None:
    """line[pixels, K] plus the bias into a row of an image, [K, H, W] or with channels last [H, W, K]."""
    if last:
        for at in range(y.shape[2]):
            out, seen = y[image, row, at], line[at]
            for k in range(np.uint64(line.shape[1])):
                out[k] = seen[k] + bias[k]
        return
    width = y.shape[3]
    for lo in range(0, width, _PIXELS):
        pixels = np.uint64(min(_PIXELS, width - lo))
        for k in range(y.shape[1]):
            out, b = y[image, k, row, lo:], bias[k]
            for at in range(pixels):
                out[at] = line[np.uint64(lo) + at, k] + b


@cache
def tiles_transform(m: int, r: int, dtype: str, gradient: bool = False) -> Kernel:
    """Kernel (x, channels last, padding, first row, rows, tile rows, tiles a row, v): tiles into v[α², tiles, C].

    Tiles begin m pixels apart. Those of an image are α wide and overlap, and become Bᵀ d B; those of the output's
    gradient are m wide and become A e Aᵀ.
    """
    at_, _, bt = matrices(m, r)
    matrix = at_.T.copy() if gradient else bt
    alpha, side = matrix.shape
    combine = _combination(matrix, dtype)

    @njit(**_OPTIONS)
    def transform(
        x: Array, last: bool, pad_y: int, pad_x: int, first: int, rows: int, th: int, tw: int, v: Array
    ) -> None:
        channels, wide = v.shape[2], (tw - 1) * m + side
        lines = np.empty((side, wide, channels), v.dtype)
        half = np.empty((alpha, wide, channels), v.dtype)
        of_lines, of_half, of_v = lines.reshape(-1), half.reshape(-1), v.reshape(-1)
        for row in range(rows):
            image, top = (first + row) // th, (first + row) % th * m - pad_y
            for i in range(side):
                _fetch(x, last, image, top + i, pad_x, lines[i])
            for i in range(alpha):
                combine(i, of_lines, 0, wide * channels, wide * channels, of_half, i * wide * channels)
            for tile in range(tw):
                at = row * tw + tile
                for i in range(alpha):
                    start = (i * wide + tile * m) * channels
                    for j in range(alpha):
                        combine(j, of_half, start, channels, channels, of_v,
                                ((i * alpha + j) * v.shape[1] + at) * channels)  # fmt: skip

    return transform


@cache
def output_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (q[α², tiles, K], bias, channels last, first row, rows, tile rows, tiles a row, y): Aᵀ M A into y."""
    alpha = m + r - 1
    combine = _combination(matrices(m, r)[0], dtype)

    @njit(**_OPTIONS)
    def transform(q: Array, bias: Array, last: bool, first: int, rows: int, th: int, tw: int, y: Array) -> None:
        height, channels = y.shape[1] if last else y.shape[2], q.shape[2]
        half = np.empty((m, alpha, channels), y.dtype)
        lines = np.empty((m, tw * m, channels), y.dtype)
        of_q, of_half, of_lines = q.reshape(-1), half.reshape(-1), lines.reshape(-1)
        plane = q.shape[1] * channels
        for row in range(rows):
            image, top = (first + row) // th, (first + row) % th * m
            for tile in range(tw):
                at = (row * tw + tile) * channels
                for j in range(alpha):
                    for i in range(m):
                        combine(i, of_q, j * plane + at, alpha * plane, channels, of_half, (i * alpha + j) * channels)
                for i in range(m):
                    for j in range(m):
                        combine(j, of_half, i * alpha * channels, channels, channels, of_lines,
                                ((i * tw + tile) * m + j) * channels)  # fmt: skip
            for i in range(min(m, height - top)):
                _store(lines[i], bias, last, image, top + i, y)

    return transform


@cache
def weight_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (w[C, K, r, r], u[α², C, K]): G g Gᵀ."""
    alpha = m + r - 1
    combine = _combination(matrices(m, r)[1], dtype)

    @njit(**_OPTIONS)
    def transform(w: Array, u: Array) -> None:
        outer = w.shape[1]
        flat = np.empty((_FILTERS, r, r, outer), w.dtype)
        half = np.empty((r, alpha, outer), w.dtype)
        of_flat, of_half, of_u = flat.reshape(-1), half.reshape(-1), u.reshape(-1)
        for first in range(0, w.shape[0], _FILTERS):
            some = min(_FILTERS, w.shape[0] - first)
            for k in range(outer):
                for c in range(some):
                    for i in range(r):
                        for j in range(r):
                            flat[c, i, j, k] = w[first + c, k, i, j]
            for c in range(some):
                for i in range(r):
                    start = (c * r + i) * r * outer
                    for j in range(alpha):
                        combine(j, of_flat, start, outer, outer, of_half, (i * alpha + j) * outer)
                for i in range(alpha):
                    for j in range(alpha):
                        combine(i, of_half, j * outer, alpha * outer, outer, of_u,
                                ((i * alpha + j) * w.shape[0] + first + c) * outer)  # fmt: skip

    return transform


@cache
def weight_gradient(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (u[α², K, C], w[K, C, r, r]): Gᵀ U G, the adjoint of `weight_transform`."""
    alpha = m + r - 1
    combine = _combination(matrices(m, r)[1].T.copy(), dtype)

    @njit(**_OPTIONS)
    def transform(u: Array, w: Array) -> None:
        channels = w.shape[1]
        half = np.empty((r, alpha, channels), w.dtype)
        found = np.empty((r, r, channels), w.dtype)
        of_u, of_half, of_found = u.reshape(-1), half.reshape(-1), found.reshape(-1)
        plane = w.shape[0] * channels
        for k in range(w.shape[0]):
            for j in range(alpha):
                for i in range(r):
                    combine(i, of_u, j * plane + k * channels, alpha * plane, channels, of_half,
                            (i * alpha + j) * channels)  # fmt: skip
            for i in range(r):
                for j in range(r):
                    combine(j, of_half, i * alpha * channels, channels, channels, of_found, (i * r + j) * channels)
            for c in range(channels):
                for i in range(r):
                    for j in range(r):
                        w[k, c, i, j] = found[i, j, c]

    return transform
