"""Downpour with staleness-aware rates, in one line per rule: servers apply pushes one by one."""

from __future__ import annotations

import numpy as np


def downpour(w: np.ndarray, pushes: list[tuple[np.ndarray, int]], rate: float, *, aware: bool) -> np.ndarray:
    """SGD on a server: `pushes` are (gradient, version of the weights it was computed with), in order of arrival.

    The version counts the updates applied before. w ← w − rate/(1 + τ) · g with τ = version now − version then.
    """
    w = w.astype(np.float32).copy()
    for version, (gradient, seen) in enumerate(pushes):
        tau = version - seen
        w -= np.float32(rate / (1 + tau) if aware else rate) * gradient.astype(np.float32)
    return w


def stale_steps(history: list[tuple[int, int]], workers: int, bound: int) -> list[tuple[int, int, int]]:
    """Steps that broke the staleness bound: (worker, steps it had taken, the slowest's), for (worker, event) in order.

    An event is +1 when the worker begins a step, 0 when its update has arrived and −1 when it is gone.
    """
    taken = dict.fromkeys(range(workers), 0)
    broken = []
    for worker, event in history:
        if event == 1:
            slowest = min(taken.values())
            if taken[worker] - slowest > bound:
                broken.append((worker, taken[worker], slowest))
        elif event == 0:
            taken[worker] += 1
        else:
            del taken[worker]
    return broken
