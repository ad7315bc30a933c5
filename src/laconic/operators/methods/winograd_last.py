"""Winograd's transforms for tensors whose channels lie side by side: vectors run over channels, not over pixels.

Callers: `winograd.py`. The kernels are those of `winograd_kernels.py` with the tiles' positions outside and the
channels inside: x[N, H, W, C] to v[α², tiles, C], products q[α², tiles, K] to y[N, H', W', K].
"""

from __future__ import annotations

from functools import cache

import numpy as np

from laconic.kernels import njit
from laconic.operators.methods.winograd_kernels import Array, Kernel, matrices


@cache
def input_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (x, padding, first row, rows, tile rows, tiles a row, v): Bᵀ d B of all tiles of some rows."""
    alpha = m + r - 1
    bt = matrices(m, r)[2].astype(dtype)

    @njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
    def transform(x: Array, pad_y: int, pad_x: int, first: int, rows: int, th: int, tw: int, v: Array) -> None:
        height, width, channels = x.shape[1], x.shape[2], np.uint64(x.shape[3])
        half = np.empty((8, alpha, x.shape[3]), x.dtype)
        zeros = np.zeros(x.shape[3], x.dtype)
        for row in range(rows):
            image, top = (first + row) // th, (first + row) % th * m - pad_y
            d = x[image]
            for tile in range(tw):
                at = row * tw + tile
                for j in range(alpha):
                    q = tile * m - pad_x + j
                    if 0 <= q < width:
                        d0 = d[top, q] if 0 <= top < height else zeros
                        d1 = d[top + 1, q] if 0 <= top + 1 < height else zeros
                        d2 = d[top + 2, q] if 0 <= top + 2 < height else zeros
                        d3 = d[top + 3, q] if 0 <= top + 3 < height else zeros
                        d4 = d[top + 4, q] if alpha > 4 and 0 <= top + 4 < height else zeros
                        d5 = d[top + 5, q] if alpha > 5 and 0 <= top + 5 < height else zeros
                        d6 = d[top + 6, q] if alpha > 6 and 0 <= top + 6 < height else zeros
                        d7 = d[top + 7, q] if alpha > 7 and 0 <= top + 7 < height else zeros
                        for i in range(alpha):
                            out = half[j, i]
                            for c in range(channels):
                                s = bt[i, 0] * d0[c] + bt[i, 1] * d1[c] + bt[i, 2] * d2[c] + bt[i, 3] * d3[c]
                                if alpha > 4:
                                    s += bt[i, 4] * d4[c] + bt[i, 5] * d5[c]
                                if alpha > 6:
                                    s += bt[i, 6] * d6[c] + bt[i, 7] * d7[c]
                                out[c] = s
                    else:
                        half[j] = 0
                for i in range(alpha):
                    z0, z1, z2, z3 = half[0, i], half[1, i], half[2, i], half[3, i]
                    z4 = half[4, i] if alpha > 4 else z3
                    z5 = half[5, i] if alpha > 4 else z3
                    z6 = half[6, i] if alpha > 6 else z3
                    z7 = half[7, i] if alpha > 6 else z3
                    for j in range(alpha):
                        out = v[i * alpha + j, at]
                        for c in range(channels):
                            s = bt[j, 0] * z0[c] + bt[j, 1] * z1[c] + bt[j, 2] * z2[c] + bt[j, 3] * z3[c]
                            if alpha > 4:
                                s += bt[j, 4] * z4[c] + bt[j, 5] * z5[c]
                            if alpha > 6:
                                s += bt[j, 6] * z6[c] + bt[j, 7] * z7[c]
                            out[c] = s

    return transform


@cache
def output_transform(m: int, r: int, dtype: str) -> Kernel:
    """Kernel (q, bias, first row, rows, tile rows, tiles a row, y): Aᵀ M A, into rows of y."""
    alpha = m + r - 1
    rows_of = matrices(m, r)[0].astype(dtype)

    @njit(nogil=True, cache=True, fastmath=True, error_model="numpy")
    def transform(q: Array, bias: Array, first: int, rows: int, th: int, tw: int, y: Array) -> None:
        height, width, channels = y.shape[1], y.shape[2], np.uint64(y.shape[3])
        half = np.empty((8, m, y.shape[3]), y.dtype)
        for row in range(rows):
            image, top = (first + row) // th, (first + row) % th * m
            for tile in range(tw):
                at, left = row * tw + tile, tile * m
                for j in range(alpha):
                    q0, q1, q2, q3 = q[j, at], q[alpha + j, at], q[2 * alpha + j, at], q[3 * alpha + j, at]
                    q4 = q[4 * alpha + j, at] if alpha > 4 else q3
                    q5 = q[5 * alpha + j, at] if alpha > 4 else q3
                    q6 = q[6 * alpha + j, at] if alpha > 6 else q3
                    q7 = q[7 * alpha + j, at] if alpha > 6 else q3
                    for i in range(m):
                        out = half[j, i]
                        for c in range(channels):
                            s = rows_of[i, 0] * q0[c] + rows_of[i, 1] * q1[c]
                            s += rows_of[i, 2] * q2[c] + rows_of[i, 3] * q3[c]
                            if alpha > 4:
                                s += rows_of[i, 4] * q4[c] + rows_of[i, 5] * q5[c]
                            if alpha > 6:
                                s += rows_of[i, 6] * q6[c] + rows_of[i, 7] * q7[c]
                            out[c] = s
                for i in range(min(m, height - top)):
                    z0, z1, z2, z3 = half[0, i], half[1, i], half[2, i], half[3, i]
                    z4 = half[4, i] if alpha > 4 else z3
                    z5 = half[5, i] if alpha > 4 else z3
                    z6 = half[6, i] if alpha > 6 else z3
                    z7 = half[7, i] if alpha > 6 else z3
                    for j in range(min(m, width - left)):
                        out = y[image, top + i, left + j]
                        for c in range(channels):
                            s = bias[c] + rows_of[j, 0] * z0[c] + rows_of[j, 1] * z1[c]
                            s += rows_of[j, 2] * z2[c] + rows_of[j, 3] * z3[c]
                            if alpha > 4:
                                s += rows_of[j, 4] * z4[c] + rows_of[j, 5] * z5[c]
                            if alpha > 6:
                                s += rows_of[j, 6] * z6[c] + rows_of[j, 7] * z7[c]
                            out[c] = s

    return transform
