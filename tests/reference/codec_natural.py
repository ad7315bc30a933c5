"""Horváth et al. 2019: a random power of two; a byte holds the sign and the exponent above its window's base."""

from __future__ import annotations

import numpy as np

WINDOW = 2048


def encode_body(x: np.ndarray, draws: np.ndarray) -> np.ndarray:
    bases, codes = [], []
    for start in range(0, x.size, WINDOW):
        part = x[start : start + WINDOW]
        biased = int(np.abs(part).max().view(np.uint32)) >> 23
        base = max(min(biased + 1, 254) - 127, 0)
        scaled = np.abs(part) * np.float32(2.0**-base)
        carried = scaled.view(np.uint32).astype(np.int64) + (draws[start : start + WINDOW].astype(np.int64) >> 9)
        bases.append(base)
        codes.append(np.minimum(carried >> 23, 127) + 128 * np.signbit(part))
    return np.concatenate([np.array(bases, dtype=np.uint8), *codes]).astype(np.uint8)


def decode_body(body: np.ndarray, numel: int) -> np.ndarray:
    count = -(-numel // WINDOW)
    base = body[:count].astype(np.float64)[np.arange(numel) // WINDOW]
    power = (body[count:] % 128).astype(np.float64)
    magnitude = np.where(power > 0, 2.0 ** (power - 127 + base), 0.0)
    return np.where(body[count:] >= 128, -magnitude, magnitude).astype(np.float32)
