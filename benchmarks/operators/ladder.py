"""The lecture's ladder: one convolution computed by ever better loops, timed beside each other and beside torch.

Caller: `operators.py`, `--ladder`. The first rungs multiply the matrix of weights with the patches written out (im2col,
charged): as the three loops stand, in blocks, with vectors, with one operand transposed. Then the product is a
library's, then the patches go, then multiplications do.

Arithmetic intensity is multiplications and additions for each byte that has to come from beyond the first-level cache;
the first three rungs read their operands again and again, so theirs is that of their inner loops.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from laconic.kernels import njit
from laconic.operators.method import build
from laconic.operators.method_error import relative_error
from laconic.operators.methods.native import convolution
from laconic.operators.shape import Convolution
from laconic.operators.timing import race

Array = np.ndarray[Any, np.dtype[Any]]
LESSON = Convolution(1, 64, 64, (56, 56), (3, 3), (1, 1), (1, 1), (1, 1))  # VGG-16's conv3 size with conv1's channels
_BLOCK = 64


@dataclass(frozen=True)
class Rung:
    """One way, what it took and what it saved: `gflops` counts the operations of the definition, whatever was done."""

    name: str
    seconds: float
    gflops: float
    speedup: float
    intensity: float
    multiplications: int
    max_error: float


@njit(nogil=True, cache=True)
def _naive(a: Array, b: Array, c: Array) -> None:
    """c = a · b, each element a sum down a column of b."""
    for i in range(c.shape[0]):
        for j in range(c.shape[1]):
            s = np.float32(0)
            for k in range(a.shape[1]):
                s += a[i, k] * b[k, j]
            c[i, j] = s


@njit(nogil=True, cache=True)
def _blocked(a: Array, b: Array, c: Array) -> None:
    """The same in blocks of b that stay in cache."""
    c[:] = 0
    for k0 in range(0, a.shape[1], _BLOCK):
        for j0 in range(0, c.shape[1], _BLOCK):
            for i in range(c.shape[0]):
                for j in range(j0, min(j0 + _BLOCK, c.shape[1])):
                    s = c[i, j]
                    for k in range(k0, min(k0 + _BLOCK, a.shape[1])):
                        s += a[i, k] * b[k, j]
                    c[i, j] = s


@njit(nogil=True, cache=True, fastmath=True)
def _vectors(a: Array, b: Array, c: Array) -> None:
    """Blocks, and the innermost loop along a row of b: sixteen products an instruction."""
    c[:] = 0
    for k0 in range(0, a.shape[1], _BLOCK):
        for j0 in range(0, c.shape[1], 4 * _BLOCK):
            width = np.uint64(min(4 * _BLOCK, c.shape[1] - j0))
            for i in range(c.shape[0]):
                out = c[i, j0:]
                for k in range(k0, min(k0 + _BLOCK, a.shape[1])):
                    w, seen = a[i, k], b[k, j0:]
                    for j in range(width):
                        out[j] += w * seen[j]


@njit(nogil=True, cache=True, fastmath=True)
def _transposed(a: Array, b: Array, c: Array) -> None:
    """b is given transposed: both operands of a dot product lie in a row; four rows of a at a time."""
    inner = np.uint64(a.shape[1])
    for j in range(c.shape[1]):
        seen = b[j]
        for i in range(0, c.shape[0] - 3, 4):
            a0, a1, a2, a3 = a[i], a[i + 1], a[i + 2], a[i + 3]
            s0 = s1 = s2 = s3 = np.float32(0)
            for k in range(inner):
                v = seen[k]
                s0 += a0[k] * v
                s1 += a1[k] * v
                s2 += a2[k] * v
                s3 += a3[k] * v
            c[i, j], c[i + 1, j], c[i + 2, j], c[i + 3, j] = s0, s1, s2, s3


def _product(kernel: Callable[[Array, Array, Array], None], transposed: bool) -> Callable[[Tensor, Tensor], Tensor]:
    def run(x: Tensor, weight: Tensor) -> Tensor:
        patches = F.unfold(x, 3, padding=1)[0]
        patches = patches.t().contiguous() if transposed else patches
        y = torch.empty(LESSON.out_channels, x.shape[2] * x.shape[3])
        kernel(weight.flatten(1).numpy(), patches.numpy(), y.numpy())
        return y.view(LESSON.output_shape)

    return run


def ladder(turns: int = 7) -> list[Rung]:
    """Time every rung on the same convolution, in turns; all results are compared with float64."""
    rng = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(shape, generator=rng) for shape in (LESSON.input_shape, LESSON.weight_shape))
    exact = convolution(x.double(), weight.double(), None, LESSON)
    loops = {"naive": _product(_naive, False), "blocked": _product(_blocked, False), "SIMD": _product(_vectors, False),
             "transposed GEMM": _product(_transposed, True)}  # fmt: skip
    ways: dict[str, Callable[[], Tensor]] = {"torch": lambda: convolution(x, weight, None, LESSON)}
    ways |= {name: partial(run, x, weight) for name, run in loops.items()}
    for spec in ("im2col", "im2col(true)", "direct", "fft", "fft(16)", "winograd(2)", "winograd(4)"):
        method = build(spec)
        ways[spec] = partial(method.run, x, method.prepare(weight, LESSON), None, LESSON)
    times = race(ways, turns, 20.0, hopeless=float("inf"))
    rungs = [
        _rung(name, times[name].seconds, times[name].speedup, relative_error(way().double(), exact))
        for name, way in ways.items()
    ]
    return [*rungs[1:], rungs[0]]


def _rung(name: str, seconds: float, speedup: float, error: float) -> Rung:
    flops = 2 * LESSON.multiplications
    # Bytes an inner iteration reads for its two operations; a block's reuse divides the stride of a column by _BLOCK.
    inner = {"naive": 64 + 4.0, "blocked": 8.0, "SIMD": 8.0, "transposed GEMM": 5.0}
    if name in inner:
        return Rung(name, seconds, flops / seconds / 1e9, speedup, 2 / inner[name], LESSON.multiplications, error)
    cost = build("native" if name == "torch" else name).cost(LESSON)
    moved = LESSON.nbytes + 2 * cost.workspace_nbytes
    return Rung(
        name, seconds, flops / seconds / 1e9, speedup, 2 * cost.multiplications / moved, cost.multiplications, error
    )
