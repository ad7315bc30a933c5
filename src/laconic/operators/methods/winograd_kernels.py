"""Winograd's transforms as compiled loops, and the matrices they follow from.

Callers: `winograd.py`. In all of them vectors run over channels: images are fetched row by row into lines of pixels
with their channels side by side, whatever their order in memory, and results are stored from such lines.

    tiles_transform    Bᵀ d B of overlapping tiles of an image, and A e Aᵀ of the tiles of a gradient
    output_transform   Aᵀ M A, into the rows of an image
    weight_transform   G g Gᵀ, and weight_gradient its adjoint, Gᵀ U G
"""

from __future__ import annotations

from fractions import Fraction
from functools import cache
from typing import Any

import numpy as np

from laconic.kernels import Array, njit
from laconic.operators.products import Kernel, panel
from laconic.operators.vectors import lanes, lines_product

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
    """line[pixels, ≥ K] plus the bias into a row of an image, [K, H, W] or with channels last [H, W, K]."""
    if last:
        for at in range(y.shape[2]):
            out, seen = y[image, row, at], line[at]
            for k in range(np.uint64(len(bias))):
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
    """Kernel (x, channels last, padding, first row, rows, tile rows, tiles a row, v): tiles into v[α², tiles, ≥ C].

    Tiles begin m pixels apart. Those of an image are α wide and overlap, and become Bᵀ d B; those of the output's
    gradient are m wide and become A e Aᵀ.
    """
    at_, _, bt = matrices(m, r)
    matrix = at_.T.copy() if gradient else bt
    alpha, side = matrix.shape
    product, size, some = lines_product(matrix, dtype), np.dtype(dtype).itemsize, lanes(dtype)

    @njit(**_OPTIONS)
    def transform(
        x: Array, last: bool, pad_y: int, pad_x: int, first: int, rows: int, th: int, tw: int, v: Array
    ) -> None:
        channels, wide = x.shape[3] if last else x.shape[1], (tw - 1) * m + side
        vectors = (channels + some - 1) // some
        lines = np.zeros((side, wide, vectors * some), v.dtype)
        half = np.empty((alpha, wide, vectors * some), v.dtype)
        line, position, pixel = wide * vectors * some, v.shape[1] * v.shape[2], vectors * some
        for row in range(rows):
            image, top = (first + row) // th, (first + row) % th * m - pad_y
            for i in range(side):
                _fetch(x, last, image, top + i, pad_x, lines[i, :, :channels])
            product((lines.ctypes.data, line), (half.ctypes.data, line), (wide * vectors,))
            for tile in range(tw):
                at = v.ctypes.data + size * (row * tw + tile) * v.shape[2]
                for i in range(alpha):
                    seen = half.ctypes.data + size * (i * wide + tile * m) * pixel
                    product((seen, pixel), (at + size * i * alpha * position, position), (vectors,))

    return transform


@cache
def output_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (q[α², tiles, ≥ K], bias, channels last, first row, rows, tile rows, tiles a row, y): Aᵀ M A into y."""
    alpha = m + r - 1
    product, size, some = lines_product(matrices(m, r)[0], dtype), np.dtype(dtype).itemsize, lanes(dtype)

    @njit(**_OPTIONS)
    def transform(q: Array, bias: Array, last: bool, first: int, rows: int, th: int, tw: int, y: Array) -> None:
        height, vectors = y.shape[1] if last else y.shape[2], (len(bias) + some - 1) // some
        pixel, position = vectors * some, q.shape[1] * q.shape[2]
        half = np.empty((m, alpha, pixel), y.dtype)
        lines = np.empty((m, tw * m, pixel), y.dtype)
        for row in range(rows):
            image, top = (first + row) // th, (first + row) % th * m
            for tile in range(tw):
                at = q.ctypes.data + size * (row * tw + tile) * q.shape[2]
                for j in range(alpha):
                    into = half.ctypes.data + size * j * pixel
                    product((at + size * j * position, alpha * position), (into, alpha * pixel), (vectors,))
                for i in range(m):
                    into = lines.ctypes.data + size * (i * tw + tile) * m * pixel
                    product((half.ctypes.data + size * i * alpha * pixel, pixel), (into, pixel), (vectors,))
            for i in range(min(m, height - top)):
                _store(lines[i], bias, last, image, top + i, y)

    return transform


@cache
def weight_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (w[C, K, r, r], u[α², ·]): G g Gᵀ, in the panels that `products.multiply` takes."""
    alpha, wide = m + r - 1, panel(dtype)
    product, size, some = lines_product(matrices(m, r)[1], dtype), np.dtype(dtype).itemsize, lanes(dtype)

    @njit(**_OPTIONS)
    def transform(w: Array, u: Array) -> None:
        inner, outer = w.shape[0], w.shape[1]
        columns = (outer + some - 1) // some * some
        flat = np.zeros((_FILTERS, r, r, columns), w.dtype)
        half = np.empty((r, alpha, columns), w.dtype)
        for first in range(0, inner, _FILTERS):
            count = min(_FILTERS, inner - first)
            for k in range(outer):
                for c in range(count):
                    for i in range(r):
                        for j in range(r):
                            flat[c, i, j, k] = w[first + c, k, i, j]
            for c in range(count):
                for i in range(r):
                    product((flat[c, i].ctypes.data, columns), (half[i].ctypes.data, columns), (columns // some,))
                for column in range(0, columns, wide):
                    width = min(wide, columns - column)
                    at = u.ctypes.data + size * (column * inner + (first + c) * wide)
                    for j in range(alpha):
                        product((half.ctypes.data + size * (j * columns + column), alpha * columns),
                                (at + size * j * u.shape[1], alpha * u.shape[1]), (width // some,))  # fmt: skip

    return transform


@cache
def weight_gradient(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (u[α², K, ≥ C], w[K, C, r, r]): Gᵀ U G, the adjoint of `weight_transform`."""
    alpha = m + r - 1
    product, size, some = lines_product(matrices(m, r)[1].T.copy(), dtype), np.dtype(dtype).itemsize, lanes(dtype)

    @njit(**_OPTIONS)
    def transform(u: Array, w: Array) -> None:
        channels, vectors = w.shape[1], (w.shape[1] + some - 1) // some
        pixel, position = vectors * some, u.shape[1] * u.shape[2]
        half = np.empty((r, alpha, pixel), w.dtype)
        found = np.empty((r, r, pixel), w.dtype)
        for k in range(w.shape[0]):
            at = u.ctypes.data + size * k * u.shape[2]
            for j in range(alpha):
                into = half.ctypes.data + size * j * pixel
                product((at + size * j * position, alpha * position), (into, alpha * pixel), (vectors,))
            for i in range(r):
                product((half[i].ctypes.data, pixel), (found[i].ctypes.data, pixel), (vectors,))
            for c in range(channels):
                for i in range(r):
                    for j in range(r):
                        w[k, c, i, j] = found[i, j, c]

    return transform
