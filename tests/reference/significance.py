"""Gaia's filter value by value: what is significant is told, the rest adds up."""

from __future__ import annotations

import math

import numpy as np


def gaia_sender(
    updates: list[np.ndarray], weights: list[np.ndarray], threshold: float
) -> tuple[list[dict[int, np.float32]], np.ndarray]:
    """What is told after each step, by index, and what has not been told at the end.

    Step t = 1, 2, … applies updates[t − 1] and leaves weights[t − 1]; |aᵢ / wᵢ| > threshold / √t is significant.
    """
    a = np.zeros_like(weights[0])
    told = []
    for t, (update, w) in enumerate(zip(updates, weights, strict=True), start=1):
        message: dict[int, np.float32] = {}
        for i in range(len(a)):
            a[i] += update[i]
            if abs(a[i]) > threshold / math.sqrt(t) * abs(w[i]):
                message[i] = a[i]
                a[i] = 0
        told.append(message)
    return told, a
