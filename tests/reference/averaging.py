"""Modes that average weights, straight from their formulas: all workers in one loop, float64.

`gradient(i, t, w)` is worker i's gradient at its step t, at w. Every function returns the workers' weights after the
last step (one row each) and the global model where there is one.
"""

from __future__ import annotations

import itertools
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


def diloco(
    gradient: Gradient,
    start: Vector,
    m: int,
    steps: int,
    eta: float,
    *,
    period: int,
    cuts: list[int],
    delay: int = 0,
    mix: float = 0.0,
    mu: float = 0.9,
    zeta: float = 0.7,
    nesterov: bool = True,
    eager: bool = False,
) -> tuple[Vector, Vector]:
    """Fragment p is the values from cuts[p] to cuts[p + 1]; the rows, and θ with nothing sent since the last merge."""
    w, theta, v = np.stack([start] * m), start.copy(), np.zeros_like(start)
    parts = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    sent: dict[int, list[tuple[int, Vector]]] = {}

    def outer(p: slice, g: Vector) -> tuple[Vector, Vector]:
        velocity = mu * v[p] + g
        return theta[p] - zeta * (g + mu * velocity if nesterov else velocity), velocity

    for s in range(1, steps + 1):
        w = np.stack([w[i] - eta * gradient(i, s - 1, w[i]) for i in range(m)])
        arriving = sent.pop(s, [])
        for number, part in enumerate(parts):
            if (s - number * period // len(parts)) % period == 0:
                rows = (number, theta[part] - w[:, part])
                if delay:
                    sent.setdefault(s + delay, []).append(rows)
                else:
                    arriving.append(rows)
        for number, delta in arriving:
            part, g = parts[number], delta.mean(axis=0)
            ends = []
            for i in range(m):
                fresh = (theta[part] - w[i, part] - delta[i]) / m if eager else 0.0
                ends.append((1 - mix) * outer(part, g + fresh)[0] + mix * w[i, part])
            theta[part], v[part] = outer(part, g)
            w[:, part] = ends
    return w, theta


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
