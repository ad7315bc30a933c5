"""factors: the weight gradient as a sum of outer products, one per sample."""

from __future__ import annotations

import numpy as np


def weight_gradient(o: np.ndarray, delta: np.ndarray) -> np.ndarray:
    total = np.zeros((delta.shape[1], o.shape[1]))
    for sample in range(o.shape[0]):
        total += np.outer(delta[sample].astype(np.float64), o[sample].astype(np.float64))
    return total


def pack_body(o: np.ndarray, delta: np.ndarray) -> bytes:
    sizes = (o.shape[0], o.shape[1], delta.shape[1], 0)
    header = b"".join(size.to_bytes(4, "little") for size in sizes)
    return header + o.astype("<f4").tobytes() + delta.astype("<f4").tobytes()
