"""Work and depth of a convolution by each method, and of reductions, as the survey writes them; energy of memory.

Callers: `cost.py`, the pages. Pure numbers. N samples, C channels in, K out, H' × W' outputs, r × r taps.

Source: Ben-Nun, Hoefler, Demystifying Parallel and Distributed Deep Learning, 2018, tables 4 and 6.
"""

from __future__ import annotations

import math

from laconic.operators.method import log2_ceiling, sum_depth
from laconic.operators.shape import Convolution

DRAM_JOULES = 640e-12  # of a 32-bit access. Source: Han et al., Deep Compression, ICLR 2016, from a 45 nm process
FFT_CONSTANT = 5.0  # operations of a complex transform of n values: 5 n log₂ n
TILE = 2  # m of F(m × m, r × r)


def direct(conv: Convolution) -> tuple[float, int]:
    """W = N·K·H'·W'·C·r², D = ⌈log₂C⌉ + ⌈log₂r⌉ + ⌈log₂r⌉."""
    return float(conv.multiplications), max(1, sum_depth(conv))


def fft(conv: Convolution) -> tuple[float, int]:
    """W = c·HW·log₂(HW)·(K·C + N·C + N·K) + HW·N·C·K, D = 2⌈log₂HW⌉ + ⌈log₂C⌉, with c = 5."""
    n, c, k, pixels = conv.batch, conv.in_channels // conv.groups, conv.out_channels, math.prod(conv.size)
    transforms = FFT_CONSTANT * pixels * math.log2(max(2, pixels)) * (k * c + n * conv.in_channels + n * k)
    return transforms + pixels * n * c * k, 2 * log2_ceiling(pixels) + log2_ceiling(c)


def winograd(conv: Convolution) -> tuple[float, int]:
    """W = α²·K·C·P + transforms, D = 2⌈log₂r⌉ + 4⌈log₂α⌉ + ⌈log₂C⌉; α = m + r − 1, P = N⌈H'/m⌉⌈W'/m⌉ tiles.

    Transforms: α·r·(r + α) for each of the K·C filters, 2α³ for each of the C tiles in, α·m·(α + m) for each of the K
    tiles out.
    Differs: the survey's table has the transforms once, and K·C·P products; each tile has α² of them.
    """
    r, m = max(conv.kernel), TILE
    alpha, c, k = m + r - 1, conv.in_channels // conv.groups, conv.out_channels
    tiles = conv.batch * math.prod(-(-n // m) for n in conv.output)
    filters = alpha * r * (r + alpha) * k * c
    moved = tiles * (2 * alpha**3 * conv.in_channels + alpha * m * (alpha + m) * k)
    return float(alpha**2 * k * c * tiles + filters + moved), (
        2 * log2_ceiling(r) + 4 * log2_ceiling(alpha) + log2_ceiling(c)
    )


def methods(conv: Convolution) -> dict[str, tuple[float, int]]:
    """(W, D) by each method that can compute this convolution."""
    found = {"direct": direct(conv), "im2col": direct(conv)}
    plain = all(s == 1 for s in conv.stride) and all(d == 1 for d in conv.dilation)
    if plain:
        found["fft"] = fft(conv)
    if plain and len(set(conv.kernel)) == 1 and conv.kernel[0] > 1 and len(conv.kernel) == 2:
        found["winograd"] = winograd(conv)
    return found


def amplification(conv: Convolution) -> float:
    """How many values im2col writes for each value of the input: 9 for a 3×3 convolution that keeps the size."""
    return conv.terms * conv.groups * math.prod(conv.output) / (conv.in_channels * math.prod(conv.size))


def dram_joules(words: float) -> float:
    """Energy of so many 32-bit accesses to memory.

    >>> 20 * dram_joules(1e9)  # a network of a billion weights, each read 20 times a second, in watts
    12.8
    """
    return DRAM_JOULES * words
