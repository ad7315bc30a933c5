"""Convolutions from their definition and from the papers' formulas, in float64, slow and obvious.

All take x (N, C, H, W), w (K, C / groups, r, s) and give y (N, K, H', W') of nn.Conv2d's correlation.
"""

from __future__ import annotations

import numpy as np


def padded(x, padding):
    (py, px) = padding
    return np.pad(x.astype(np.float64), ((0, 0), (0, 0), (py, py), (px, px)))


def convolve(x, w, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    """The definition: y[n, k, i, j] = Σ_c Σ_a Σ_b w[k, c, a, b] · x[n, c, i·s + a·d, j·s + b·d]."""
    x, w = padded(x, padding), w.astype(np.float64)
    n, _, height, width = x.shape
    k, inner, r, s = w.shape
    (sy, sx), (dy, dx) = stride, dilation
    rows, columns = (height - dy * (r - 1) - 1) // sy + 1, (width - dx * (s - 1) - 1) // sx + 1
    y = np.zeros((n, k, rows, columns))
    for out in range(k):
        first = out // (k // groups) * inner
        for i in range(rows):
            for j in range(columns):
                seen = x[:, first : first + inner, i * sy : i * sy + dy * (r - 1) + 1 : dy,
                         j * sx : j * sx + dx * (s - 1) + 1 : dx]  # fmt: skip
                y[:, out, i, j] = (seen * w[out]).sum((1, 2, 3))
    return y


def input_gradient(grad, w, size, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    """Each output's gradient goes back to the inputs it was made of."""
    w = w.astype(np.float64)
    k, inner, r, s = w.shape
    (py, px), (sy, sx), (dy, dx) = padding, stride, dilation
    x = np.zeros((grad.shape[0], inner * groups, size[0] + 2 * py, size[1] + 2 * px))
    for out in range(k):
        first = out // (k // groups) * inner
        for i in range(grad.shape[2]):
            for j in range(grad.shape[3]):
                x[:, first : first + inner, i * sy : i * sy + dy * (r - 1) + 1 : dy,
                  j * sx : j * sx + dx * (s - 1) + 1 : dx] += grad[:, out, i, j, None, None, None] * w[out]  # fmt: skip
    return x[:, :, py : py + size[0], px : px + size[1]]


def weight_gradient(x, grad, kernel, stride=(1, 1), padding=(0, 0), dilation=(1, 1), groups=1):
    """Each output's gradient times the inputs it was made of."""
    x = padded(x, padding)
    k, inner = grad.shape[1], x.shape[1] // groups
    (sy, sx), (dy, dx), (r, s) = stride, dilation, kernel
    w = np.zeros((k, inner, r, s))
    for out in range(k):
        first = out // (k // groups) * inner
        for i in range(grad.shape[2]):
            for j in range(grad.shape[3]):
                seen = x[:, first : first + inner, i * sy : i * sy + dy * (r - 1) + 1 : dy,
                         j * sx : j * sx + dx * (s - 1) + 1 : dx]  # fmt: skip
                w[out] += (grad[:, out, i, j, None, None, None] * seen).sum(0)
    return w


def by_im2col(x, w, padding=(0, 0)):
    """Patches as columns, then one matrix product; stride 1."""
    x, w = padded(x, padding), w.astype(np.float64)
    n, _, height, width = x.shape
    k, _, r, s = w.shape
    rows, columns = height - r + 1, width - s + 1
    patches = np.stack([x[:, :, i : i + r, j : j + s].reshape(n, -1) for i in range(rows) for j in range(columns)], 2)
    return (w.reshape(k, -1) @ patches).reshape(n, k, rows, columns)


def by_fft(x, w, padding=(0, 0)):
    """The product of whole spectra; stride 1."""
    x, w = padded(x, padding), w.astype(np.float64)
    size = x.shape[2:]
    spectra = np.einsum("nchw,kchw->nkhw", np.fft.fft2(x), np.fft.fft2(w, size).conj())
    y = np.fft.ifft2(spectra).real
    return y[:, :, : size[0] - w.shape[2] + 1, : size[1] - w.shape[3] + 1]


# Lavin and Gray, Fast Algorithms for Convolutional Neural Networks, §4.1 and §4.2: Bᵀ, G, Aᵀ of F(2, 3).
LAVIN_B = np.array([[1, 0, -1, 0], [0, 1, 1, 0], [0, -1, 1, 0], [0, 1, 0, -1.0]])
LAVIN_G = np.array([[1, 0, 0], [0.5, 0.5, 0.5], [0.5, -0.5, 0.5], [0, 0, 1.0]])
LAVIN_A = np.array([[1, 1, 1, 0], [0, 1, -1, -1.0]])


def by_winograd(x, w, padding=(0, 0)):
    """F(2×2, 3×3), tile by tile, counting multiplications; stride 1. Returns y and the count."""
    x, w = padded(x, padding), w.astype(np.float64)
    n, _, height, width = x.shape
    k = w.shape[0]
    rows, columns = height - 2, width - 2
    th, tw = -(-rows // 2), -(-columns // 2)
    x = np.pad(x, ((0, 0), (0, 0), (0, 2 * th + 2 - height), (0, 2 * tw + 2 - width)))
    u = LAVIN_G @ w @ LAVIN_G.T
    y, count = np.zeros((n, k, 2 * th, 2 * tw)), 0
    for image in range(n):
        for i in range(th):
            for j in range(tw):
                v = LAVIN_B @ x[image, :, 2 * i : 2 * i + 4, 2 * j : 2 * j + 4] @ LAVIN_B.T
                products = (u * v).sum(1)
                count += u.size
                y[image, :, 2 * i : 2 * i + 2, 2 * j : 2 * j + 2] = LAVIN_A @ products @ LAVIN_A.T
    return y[:, :, :rows, :columns], count
