"""A running Fisher matrix, dense, cut to rank plus identity after every batch; and its smoothed inverse."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def running(batches: list[Matrix], forget: float, rank: int) -> Matrix:
    """F ← (1−η)F + η·mean(xxᵀ). The part above ρI is cut to its `rank` largest eigenvalues, the rest added to ρ."""
    dimension = batches[0].shape[1]
    low, rho = np.zeros((dimension, dimension)), 0.0
    for number, rows in enumerate(batches):
        new = forget if number else 1.0
        low = (1 - new) * low + new * rows.T @ rows / len(rows)
        values, vectors = np.linalg.eigh(low)
        kept = values.copy()
        kept[: dimension - rank] = 0
        rho = (1 - new) * rho + (values.sum() - kept.sum()) / dimension
        low = (vectors * kept) @ vectors.T
    return low + rho * np.eye(dimension)


def precondition(factor: Matrix, smoothing: float, rows: Matrix) -> Matrix:
    """rows·(F + α·tr(F)/D·I)⁻¹."""
    dimension = len(factor)
    return np.asarray(rows @ np.linalg.inv(factor + smoothing * np.trace(factor) / dimension * np.eye(dimension)))
