"""Skip-gram with negative sampling straight from the formula, one pair at a time."""

from __future__ import annotations

import numpy as np


def sigmoid(x: float) -> float:
    return 1.0 / (1.0 + np.exp(-x))


def objective(v: np.ndarray, u: np.ndarray, centre: int, context: int, negatives: list[int]) -> float:
    """log σ(v_c·u_o) + Σ log σ(−v_c·u_n); a negative that is the context itself does not count."""
    total = np.log(sigmoid(v[centre] @ u[context]))
    for n in negatives:
        if n != context:
            total += np.log(sigmoid(-(v[centre] @ u[n])))
    return float(total)


def ascend(v, u, pairs, negatives, rate: float, fall: float) -> tuple[np.ndarray, np.ndarray]:
    """New v and u, float64; contexts change within a pair, the centre after it."""
    v, u = v.astype(np.float64), u.astype(np.float64)
    for (centre, context), drawn in zip(pairs, negatives, strict=True):
        change = np.zeros(v.shape[1])
        for row, label in [(context, 1.0)] + [(n, 0.0) for n in drawn if n != context]:
            step = rate * (label - sigmoid(v[centre] @ u[row]))
            change += step * u[row]
            u[row] = u[row] + step * v[centre]
        v[centre] += change
        rate -= fall
    return v, u
