"""Some steps of an LSTM or a GRU, forward and back: for each a matrix product and a pass over the values, compiled.

Callers: `recurrent.py`, which makes the products of the inputs. Arrays have a row for each sequence that is still going
on; states have one more axis, h and, of an LSTM, c. What a step computed inside is kept in the memory of its inputs'
products: gates after their sigmoids and tanhs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from laconic.kernels import Array, njit
from laconic.operators.products import Kernel, matrix_product, panel

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "fastmath": True, "error_model": "numpy"}
# tanh x = x·P(x²)/Q(x²) for |x| ≤ 9, fitted by least squares with weights for the largest relative error, 1.3e-9; in
# float32 arithmetic it is off by 3.5e-7. Unlike the library's function it is vectorised.
_P = (0.9999999987, 0.136808492, 3.86949896e-3, 2.803113e-5, 3.06421e-8, -1.22459e-11)
_Q = (1.0, 0.470141813, 2.72501235e-2, 3.94069749e-4, 1.28902254e-6)


@dataclass(frozen=True)
class Cell:
    """What a step computes. `gates` × hidden is the width of its products, `kept` × hidden what going back needs of
    its insides, beside its `states`; `passes(dtype)` are the compiled ones of a step, forward and back.

    forward(inside, at, recurrent, before, start, after, rows): from the products of the inputs, `inside` from row `at`
    on, and of the state to the state after, from row `at` on; the state before begins at row `start`.
    back(inside, at, before, start, after, of_output, grads, inputs, recurrent, here, rows): the gradients of both
    products into rows of `inputs` and `recurrent` from `here` on. `grads` are of the state after and become those of
    the state before, but for the recurrent product.
    """

    gates: int
    states: int
    kept: int
    passes: Callable[[str], tuple[Kernel, Kernel]]


def _tanh(dtype: str) -> Callable[[Any], Any]:
    """A compiled tanh: the fraction for float32, the library's for float64."""
    if dtype != "float32":
        return njit(**_OPTIONS)(lambda x: math.tanh(x))
    p0, p1, p2, p3, p4, p5 = (np.float32(v) for v in _P)
    q0, q1, q2, q3, q4 = (np.float32(v) for v in _Q)
    one, most = np.float32(1), np.float32(9)

    @njit(**_OPTIONS)
    def tanh(x: Any) -> Any:
        x = min(max(x, -most), most)
        s = x * x
        p = x * (p0 + s * (p1 + s * (p2 + s * (p3 + s * (p4 + s * p5)))))
        return min(max(p / (q0 + s * (q1 + s * (q2 + s * (q3 + s * q4)))), -one), one)

    return tanh


# Each of the following loops writes one array: with more of them the compiler cannot tell that they do not overlap, and
# gives up its vectors.


@cache
def _lstm(dtype: str) -> tuple[Kernel, Kernel]:
    """i, f, o = σ(·), g = tanh(·); c ← f·c + i·g; h ← o·tanh c. Source: Hochreiter, Schmidhuber 1997; Gers 2000."""
    kind = np.dtype(dtype).type
    tanh, half, one = _tanh(dtype), kind(0.5), kind(1)

    @njit(**_OPTIONS)
    def forward(
        inside: Array, at: int, recurrent: Array, before: Array, start: int, after: Array, rows: int
    ) -> None:
        width = after.shape[2]
        count = np.uint64(width)
        for row in range(rows):
            gates, products = inside[at + row], recurrent[row]
            i, f, g, o = gates, gates[width:], gates[2 * width :], gates[3 * width :]
            old, h, c = before[1, start + row], after[0, at + row], after[1, at + row]
            for n in range(4 * count):
                gates[n] += products[n]
            for n in range(2 * count):
                i[n] = half + half * tanh(half * i[n])  # and f, which lies behind it
            for n in range(count):
                g[n] = tanh(g[n])
            for n in range(count):
                o[n] = half + half * tanh(half * o[n])
            for n in range(count):
                c[n] = f[n] * old[n] + i[n] * g[n]
            for n in range(count):
                h[n] = o[n] * tanh(c[n])

    @njit(**_OPTIONS)
    def back(
        inside: Array, at: int, before: Array, start: int, after: Array, of_output: Array, grads: Array,
        inputs: Array, recurrent: Array, here: int, rows: int
    ) -> None:  # fmt: skip
        width = after.shape[2]
        count = np.uint64(width)
        for row in range(rows):
            gates, found = inside[at + row], inputs[here + row]
            i, f, g, o = gates, gates[width:], gates[2 * width :], gates[3 * width :]
            di, df, dg, do = found, found[width:], found[2 * width :], found[3 * width :]
            old, new, y = before[1, start + row], after[1, at + row], of_output[here + row]
            h, c = grads[0, row], grads[1, row]
            for n in range(count):
                h[n] += y[n]
            for n in range(count):
                do[n] = tanh(new[n])
            for n in range(count):
                c[n] += h[n] * o[n] * (one - do[n] * do[n])
            for n in range(count):
                do[n] *= h[n] * o[n] * (one - o[n])
            for n in range(count):
                di[n] = c[n] * g[n] * i[n] * (one - i[n])
            for n in range(count):
                df[n] = c[n] * old[n] * f[n] * (one - f[n])
            for n in range(count):
                dg[n] = c[n] * i[n] * (one - g[n] * g[n])
            for n in range(count):
                c[n] *= f[n]
            h[:] = 0

    return forward, back


@cache
def _gru(dtype: str) -> tuple[Kernel, Kernel]:
    """r, z = σ(·); n = tanh(W x + r·(U h + b)); h ← (1 − z)·n + z·h. Source: Cho et al. 2014, as in cuDNN."""
    kind = np.dtype(dtype).type
    tanh, half, one = _tanh(dtype), kind(0.5), kind(1)

    @njit(**_OPTIONS)
    def forward(
        inside: Array, at: int, recurrent: Array, before: Array, start: int, after: Array, rows: int
    ) -> None:
        width = after.shape[2]
        count = np.uint64(width)
        for row in range(rows):
            r, products = inside[at + row], recurrent[row]
            z, new, hidden = r[width:], r[2 * width :], r[3 * width :]
            old, h = before[0, start + row], after[0, at + row]
            for n in range(2 * count):
                r[n] = half + half * tanh(half * (r[n] + products[n]))  # and z, which lies behind it
            hidden[:] = products[2 * width : 3 * width]
            for n in range(count):
                new[n] = tanh(new[n] + r[n] * hidden[n])
            for n in range(count):
                h[n] = new[n] + z[n] * (old[n] - new[n])

    @njit(**_OPTIONS)
    def back(
        inside: Array, at: int, before: Array, start: int, after: Array, of_output: Array, grads: Array,
        inputs: Array, recurrent: Array, here: int, rows: int
    ) -> None:  # fmt: skip
        width = after.shape[2]
        count = np.uint64(width)
        for row in range(rows):
            r, dr, ur = inside[at + row], inputs[here + row], recurrent[here + row]
            z, new, hidden = r[width:], r[2 * width :], r[3 * width :]
            dz, dn, un = dr[width:], dr[2 * width :], ur[2 * width :]
            old, y, h = before[0, start + row], of_output[here + row], grads[0, row]
            for n in range(count):
                h[n] += y[n]
            for n in range(count):
                dn[n] = h[n] * (one - z[n]) * (one - new[n] * new[n])
            for n in range(count):
                dr[n] = dn[n] * hidden[n] * r[n] * (one - r[n])
            for n in range(count):
                dz[n] = h[n] * (old[n] - new[n]) * z[n] * (one - z[n])
            ur[: 2 * width] = dr[: 2 * width]
            for n in range(count):
                un[n] = dn[n] * r[n]
            for n in range(count):
                h[n] *= z[n]

    return forward, back


CELLS = {"LSTM": Cell(4, 2, 4, _lstm), "GRU": Cell(3, 1, 4, _gru)}


@cache
def forward_steps(kind: str, dtype: str) -> Kernel:
    """Kernel (sizes, place, inside, after, last, u, bias): the steps of a block, each of `sizes` rows.

    `inside` holds the products of the inputs, from row `place` on, and `after` gets the states there. `last` is the
    state before, and becomes for each sequence the one after its last step here. `u` are the recurrent weights,
    [hidden, gates · hidden] in panels, `bias` is added to their products.
    """
    step, product, wide = CELLS[kind].passes(dtype)[0], matrix_product(dtype), panel(dtype)

    @njit(**_OPTIONS)
    def kernel(sizes: Array, place: int, inside: Array, after: Array, last: Array, u: Array, bias: Array) -> None:
        hidden, columns = last.shape[2], u.shape[0] * wide
        recurrent = np.empty((sizes[0], columns), inside.dtype)
        before, start, at = last, 0, place
        for s in range(len(sizes)):
            rows = sizes[s]
            for row in range(rows):
                recurrent[row] = bias
            product(
                (before[0, start:].ctypes.data, hidden, 1), (u.ctypes.data, wide, wide * hidden),
                (recurrent.ctypes.data, columns), (rows, hidden, columns, 1),
            )  # fmt: skip
            step(inside, at, recurrent, before, start, after, rows)
            if s + 1 == len(sizes) or sizes[s + 1] < rows:  # what ends here, or with the block, keeps this state
                last[:, :rows] = after[:, at : at + rows]
            before, start, at = after, at, at + rows

    return kernel


@cache
def back_steps(kind: str, dtype: str) -> Kernel:
    """Kernel (sizes, place, inside, after, before, of_output, grads, w, inputs, recurrent): back through a block.

    `before` is the state before the block, `of_output` the gradient of its outputs, `grads` those of the states, with
    rows of whole panels; `w` are the recurrent weights, [gates · hidden, hidden] in panels. The gradients of both
    products go into `inputs` and `recurrent`, which may be one.
    """
    step, product, wide = CELLS[kind].passes(dtype)[1], matrix_product(dtype), panel(dtype)

    @njit(**_OPTIONS)
    def kernel(
        sizes: Array, place: int, inside: Array, after: Array, before: Array, of_output: Array, grads: Array,
        w: Array, inputs: Array, recurrent: Array
    ) -> None:  # fmt: skip
        here, depth = len(inputs), inputs.shape[1]
        for s in range(len(sizes) - 1, -1, -1):
            rows = sizes[s]
            here -= rows
            source, start = (after, place + here - sizes[s - 1]) if s > 0 else (before, 0)
            step(inside, place + here, source, start, after, of_output, grads, inputs, recurrent, here, rows)
            product(
                (recurrent[here:].ctypes.data, depth, 1), (w.ctypes.data, wide, wide * depth),
                (grads.ctypes.data, grads.shape[2]), (rows, depth, grads.shape[2], 1),
            )  # fmt: skip

    return kernel
