"""Modes that average weights, straight from their formulas: all workers in one loop, float64.

`gradient(i, t, w)` is worker i's gradient at its step t, at w. Every function returns the workers' weights after the
last step (one row each) and the global model where there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

Vector = NDArray[np.float64]
Gradient = Callable[[int, int, Vector], Vector]


def local(gradient: Gradient, start: Vector, m: int, steps: int, eta: float, period: int) -> Vector:
    w = np.stack([start] * m)
    for t in range(steps):
        w = np.stack([w[i] - eta * gradient(i, t, w[i]) for i in range(m)])
        if (t + 1) % period == 0:
            w = np.stack([w.mean(axis=0)] * m)
    return w


def block_momentum(
    gradient: Gradient, start: Vector, m: int, blocks: int, eta: float, period: int, mu: float, zeta: float, nag: bool
) -> tuple[Vector, Vector]:
    glob, delta, begin = start.copy(), np.zeros_like(start), start.copy()
    for block in range(blocks):
        w = np.stack([begin] * m)
        for t in range(block * period, (block + 1) * period):
            w = np.stack([w[i] - eta * gradient(i, t, w[i]) for i in range(m)])
        g = w.mean(axis=0) - begin
        delta = mu * delta + zeta * g
        glob = glob + delta
        begin = glob + mu * delta if nag else glob
    return np.stack([begin] * m), glob


def easgd(
    gradient: Gradient, start: Vector, m: int, steps: int, eta: float, alpha: float, beta: float, period: int
) -> tuple[Vector, Vector]:
    w, centre = np.stack([start] * m), start.copy()
    for t in range(steps):
        old, old_centre = w.copy(), centre.copy()
        w = np.stack([old[i] - eta * gradient(i, t, old[i]) for i in range(m)])
        if t % period == 0:
            w = w - alpha * (old - old_centre)
            centre = (1 - beta) * old_centre + beta / m * old.sum(axis=0)
    return w, centre


def eamsgd(
    gradient: Gradient,
    start: Vector,
    m: int,
    steps: int,
    eta: float,
    alpha: float,
    beta: float,
    period: int,
    delta: float,
) -> tuple[Vector, Vector]:
    """The workers' rows are w + δv, where the next gradient is taken."""
    w, v, centre = np.stack([start] * m), np.zeros((m, start.size)), start.copy()
    for t in range(steps):
        old, old_centre = w.copy(), centre.copy()
        v = np.stack([delta * v[i] - eta * gradient(i, t, old[i] + delta * v[i]) for i in range(m)])
        w = old + v
        if t % period == 0:
            w = w - alpha * (old - old_centre)
            centre = (1 - beta) * old_centre + beta / m * old.sum(axis=0)
    return w + delta * v, centre


def ring(m: int) -> Vector:
    """Metropolis weights on a ring: every worker and its neighbours with equal weights."""
    w = np.zeros((m, m))
    for i in range(m):
        near = {i, (i + 1) % m, (i - 1) % m}
        for j in near:
            w[i, j] = 1 / len(near)
    return w


def exponential(m: int, t: int) -> Vector:
    """One peer a step: worker i hears the one 1, 2, 4, … places behind, in turn."""
    hops = [2**k for k in range(m) if 2**k < m]
    w = np.zeros((m, m))
    for i in range(m):
        w[i, i] += 0.5
        w[i, (i - hops[t % len(hops)]) % m] += 0.5
    return w


def dpsgd(gradient: Gradient, start: Vector, mixing: Callable[[int], Vector], steps: int, eta: float) -> Vector:
    m = len(mixing(0))
    w = np.stack([start] * m)
    for t in range(steps):
        w = mixing(t) @ w - eta * np.stack([gradient(i, t, w[i]) for i in range(m)])
    return w
