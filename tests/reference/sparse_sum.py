"""Sums of sparse vectors, slowly: dense float32 additions in the order that each algorithm promises."""

from __future__ import annotations

import numpy as np


def to_dense(indices, values, numel):
    dense = np.zeros(numel, np.float32)
    for index, value in zip(indices, values, strict=True):
        dense[index] = value
    return dense


def by_rank(streams, numel):
    """((x₀ + x₁) + x₂) + …"""
    total = np.zeros(numel, np.float32)
    for indices, values in streams:
        total = total + to_dense(indices, values, numel)
    return total


def by_tree(streams, numel):
    """Surplus ranks onto the first ones, then halves of halves: sum(lower half) + sum(upper half)."""
    dense = [to_dense(indices, values, numel) for indices, values in streams]
    core = 1
    while 2 * core <= len(dense):
        core *= 2
    held = [dense[r] + dense[r + core] if r + core < len(dense) else dense[r] for r in range(core)]

    def total(part):
        if len(part) == 1:
            return part[0]
        # Neighbours meet first: ranks 0 and 1, then 0–1 and 2–3, …
        half = len(part) // 2
        return total(part[:half]) + total(part[half:])

    return total(held)


def union(streams):
    """The places that any stream fills, sorted."""
    places = set()
    for indices, _ in streams:
        places |= {int(i) for i in indices}
    return sorted(places)
