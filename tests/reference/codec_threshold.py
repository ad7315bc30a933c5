"""threshold: ±t wherever |x| > t."""

from __future__ import annotations

import numpy as np

from reference import index_packing


def encode_body(x: np.ndarray, t: float) -> np.ndarray:
    chosen = [i for i in range(x.size) if abs(x[i]) > np.float32(t)]
    return index_packing.body(chosen, x.size, np.float32(t).tobytes() + index_packing.signs(x[chosen]))


def decode_body(body: np.ndarray, numel: int, t: float) -> np.ndarray:
    chosen, values = index_packing.split_body(body, numel)
    negative = np.array(index_packing.to_bits(values[4:])[: len(chosen)], dtype=bool)
    return index_packing.scatter(chosen, np.where(negative, -np.float32(t), np.float32(t)), numel)
