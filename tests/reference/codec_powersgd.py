"""PowerSGD's orthogonalisation and projection, by least squares instead of Gram–Schmidt."""

from __future__ import annotations

import numpy as np


def approximate(m: np.ndarray, q: np.ndarray) -> np.ndarray:
    """The orthogonal projection of M's columns on the span of M Q's columns, in float64."""
    m = m.astype(np.float64)
    u, s, _ = np.linalg.svd(m @ q.astype(np.float64), full_matrices=False)
    basis = u[:, s > 1e-9 * max(s.max(initial=0.0), 1e-300)]
    return basis @ (basis.T @ m)
