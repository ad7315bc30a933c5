"""One step of an LSTM and of a GRU, forward and back, in one compiled pass over its values each.

Callers: `recurrent.py`, which makes the matrix products. Arrays have a row for each sequence that is still going on.
What a step computed inside is kept in the memory of its products: gates after their sigmoids and tanhs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache
from typing import Any, ClassVar, Protocol

import numpy as np

from laconic.kernels import Array, njit

_OPTIONS: dict[str, Any] = {"nogil": True, "cache": True, "fastmath": True, "error_model": "numpy"}
# tanh x = x·P(x²)/Q(x²) for |x| ≤ 9, fitted by least squares with weights for the largest relative error, 1.3e-9; in
# float32 arithmetic it is off by 3.5e-7. Unlike the library's function it is vectorised.
_P = (0.9999999987, 0.136808492, 3.86949896e-3, 2.803113e-5, 3.06421e-8, -1.22459e-11)
_Q = (1.0, 0.470141813, 2.72501235e-2, 3.94069749e-4, 1.28902254e-6)


class Cell(Protocol):
    """What a step computes. `gates` × hidden is the width of its products, `kept` × hidden what going back needs of
    its insides, beside its `states`."""

    gates: ClassVar[int]
    states: ClassVar[int]
    kept: ClassVar[int]

    def forward(self, inside: Array, recurrent: Array, before: tuple[Array, ...], after: tuple[Array, ...]) -> None:
        """From the products of input and state to the state after; `inside` has the input's at first.

        An LSTM's recurrent products are in `inside` already.
        """
        ...

    def back(
        self, inside: Array, states: tuple[Array, ...], grads: tuple[Array, ...], found: tuple[Array, Array]
    ) -> None:
        """Gradients of both products into `found`; `grads` are of the output, then of the state after and, in place,
        of the state before but for the recurrent products. `states`: before, then after.
        """
        ...


def _tanh(dtype: str) -> Callable[[Any], Any]:
    """A compiled tanh: the fraction for float32, the library's for float64."""
    if dtype != "f":
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
def _lstm(dtype: str) -> tuple[Callable[..., None], Callable[..., None]]:
    kind = np.dtype(dtype).type
    tanh, half, one = _tanh(dtype), kind(0.5), kind(1)

    @njit(**_OPTIONS)
    def forward(gates: Array, c_before: Array, h_after: Array, c_after: Array) -> None:
        width = h_after.shape[1]
        count = np.uint64(width)
        for row in range(gates.shape[0]):
            i, f = gates[row, :width], gates[row, width : 2 * width]
            g, o = gates[row, 2 * width : 3 * width], gates[row, 3 * width :]
            before, h, c = c_before[row], h_after[row], c_after[row]
            for at in range(2 * count):
                i[at] = half + half * tanh(half * i[at])  # and f, which lies behind it
            for at in range(count):
                g[at] = tanh(g[at])
            for at in range(count):
                o[at] = half + half * tanh(half * o[at])
            for at in range(count):
                c[at] = f[at] * before[at] + i[at] * g[at]
            for at in range(count):
                h[at] = o[at] * tanh(c[at])

    @njit(**_OPTIONS)
    def back(
        gates: Array, c_before: Array, c_after: Array, of_output: Array, dh: Array, dc: Array, found: Array
    ) -> None:
        width = dh.shape[1]
        count = np.uint64(width)
        for row in range(gates.shape[0]):
            i, f = gates[row, :width], gates[row, width : 2 * width]
            g, o = gates[row, 2 * width : 3 * width], gates[row, 3 * width :]
            di, df = found[row, :width], found[row, width : 2 * width]
            dg, do = found[row, 2 * width : 3 * width], found[row, 3 * width :]
            before, after, y, h, c = c_before[row], c_after[row], of_output[row], dh[row], dc[row]
            for at in range(count):
                h[at] += y[at]
            for at in range(count):
                do[at] = tanh(after[at])
            for at in range(count):
                c[at] += h[at] * o[at] * (one - do[at] * do[at])
            for at in range(count):
                do[at] *= h[at] * o[at] * (one - o[at])
            for at in range(count):
                di[at] = c[at] * g[at] * i[at] * (one - i[at])
            for at in range(count):
                df[at] = c[at] * before[at] * f[at] * (one - f[at])
            for at in range(count):
                dg[at] = c[at] * i[at] * (one - g[at] * g[at])
            for at in range(count):
                c[at] *= f[at]
            h[:] = 0

    return forward, back


@cache
def _gru(dtype: str) -> tuple[Callable[..., None], Callable[..., None]]:
    kind = np.dtype(dtype).type
    tanh, half, one = _tanh(dtype), kind(0.5), kind(1)

    @njit(**_OPTIONS)
    def forward(inside: Array, recurrent: Array, h_before: Array, h_after: Array) -> None:
        width = h_after.shape[1]
        count = np.uint64(width)
        for row in range(inside.shape[0]):
            r, z = inside[row, :width], inside[row, width : 2 * width]
            n, hidden = inside[row, 2 * width : 3 * width], inside[row, 3 * width :]
            products, before, h = recurrent[row], h_before[row], h_after[row]
            for at in range(2 * count):
                r[at] = half + half * tanh(half * (r[at] + products[at]))  # and z, which lies behind it
            hidden[:] = products[2 * width :]
            for at in range(count):
                n[at] = tanh(n[at] + r[at] * hidden[at])
            for at in range(count):
                h[at] = n[at] + z[at] * (before[at] - n[at])

    @njit(**_OPTIONS)
    def back(inside: Array, h_before: Array, of_output: Array, dh: Array, found: Array, recurrent: Array) -> None:
        width = dh.shape[1]
        count = np.uint64(width)
        for row in range(inside.shape[0]):
            r, z = inside[row, :width], inside[row, width : 2 * width]
            n, hidden = inside[row, 2 * width : 3 * width], inside[row, 3 * width :]
            dr, dz, dn = found[row, :width], found[row, width : 2 * width], found[row, 2 * width :]
            un, before, y, h = recurrent[row, 2 * width :], h_before[row], of_output[row], dh[row]
            for at in range(count):
                h[at] += y[at]
            for at in range(count):
                dn[at] = h[at] * (one - z[at]) * (one - n[at] * n[at])
            for at in range(count):
                dr[at] = dn[at] * hidden[at] * r[at] * (one - r[at])
            for at in range(count):
                dz[at] = h[at] * (before[at] - n[at]) * z[at] * (one - z[at])
            recurrent[row, : 2 * width] = found[row, : 2 * width]
            for at in range(count):
                un[at] = dn[at] * r[at]
            for at in range(count):
                h[at] *= z[at]

    return forward, back


class LstmCell:
    """i, f, o = σ(·), g = tanh(·); c ← f·c + i·g; h ← o·tanh c. Source: Hochreiter, Schmidhuber 1997; Gers 2000."""

    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2
    kept: ClassVar[int] = 4

    def forward(self, inside: Array, recurrent: Array, before: tuple[Array, ...], after: tuple[Array, ...]) -> None:
        _lstm(inside.dtype.char)[0](inside, before[1], *after)

    def back(
        self, inside: Array, states: tuple[Array, ...], grads: tuple[Array, ...], found: tuple[Array, Array]
    ) -> None:
        _lstm(inside.dtype.char)[1](inside, states[1], states[3], *grads, found[0])


class GruCell:
    """r, z = σ(·); n = tanh(W x + r·(U h + b)); h ← (1 − z)·n + z·h. Source: Cho et al. 2014, as in cuDNN."""

    gates: ClassVar[int] = 3
    states: ClassVar[int] = 1
    kept: ClassVar[int] = 4

    def forward(self, inside: Array, recurrent: Array, before: tuple[Array, ...], after: tuple[Array, ...]) -> None:
        _gru(inside.dtype.char)[0](inside, recurrent, before[0], after[0])

    def back(
        self, inside: Array, states: tuple[Array, ...], grads: tuple[Array, ...], found: tuple[Array, Array]
    ) -> None:
        _gru(inside.dtype.char)[1](inside, states[0], *grads, *found)


CELLS: dict[str, Cell] = {"LSTM": LstmCell(), "GRU": GruCell()}
