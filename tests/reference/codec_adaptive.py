"""adaptive: the largest share of each sign, replaced by its mean."""

from __future__ import annotations

import numpy as np

from reference import index_packing
from reference.codec_topk import k_of


def one_sign(magnitudes: np.ndarray, fraction: float) -> tuple[list[int], np.float32]:
    """The chosen indices among the magnitudes above 0, and the mean of what is chosen."""
    candidates = [i for i in range(magnitudes.size) if magnitudes[i] > 0]
    candidates.sort(key=lambda i: (-magnitudes[i], i))
    chosen = sorted(candidates[: k_of(fraction, len(candidates))])
    total = 0.0
    for i in chosen:
        total += float(magnitudes[i])
    return chosen, np.float32(total / max(1, len(chosen)))


def encode_body(x: np.ndarray, fraction: float) -> np.ndarray:
    above, mean_above = one_sign(x, fraction)
    below, mean_below = one_sign(-x, fraction)
    chosen = sorted(above + below)
    scales = mean_above.tobytes() + mean_below.tobytes()
    return index_packing.body(chosen, x.size, scales + index_packing.signs(x[chosen]))


def decode_body(body: np.ndarray, numel: int, fraction: float) -> np.ndarray:
    chosen, values = index_packing.split_body(body, numel)
    above, below = np.frombuffer(values[:8], "<f4")
    negative = np.array(index_packing.to_bits(values[8:])[: len(chosen)], dtype=bool)
    return index_packing.scatter(chosen, np.where(negative, -below, above), numel)
