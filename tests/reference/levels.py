"""Slow twin of unbiased rounding to top + 1 equally spaced levels from −scale to scale, in the stated fixed point."""

from __future__ import annotations

import numpy as np

from reference import planes


def codes(x: np.ndarray, scale: np.float32, top: int, draws: np.ndarray) -> np.ndarray:
    """⌊top/2·(x/scale + 1) + u⌋ with f = 31 − bits(top) fractional bits; u is the draw's first f bits."""
    f = 31 - top.bit_length()
    middle = top * 2 ** (f - 1)
    lift = 2.0**96 if scale < 2.0**-60 else 1.0
    c = np.float32(middle / (float(scale) * lift)) if scale > 0 else np.float32(0)
    y = np.clip(x * np.float32(lift) * c, -np.float32(middle), np.float32(middle))
    fixed = np.trunc(y).astype(np.int64) + middle + (draws.astype(np.int64) >> (32 - f))
    return fixed >> f


def encode(x: np.ndarray, scales: list, top: int, bits: int, bucket: int | None, draws: np.ndarray) -> np.ndarray:
    """Scales, then codes; bits = 0 packs trits."""
    stored = np.array(scales, dtype="<f4")
    size = bucket or max(x.size, 1)
    parts = [
        codes(x[i * size : (i + 1) * size], scale, top, draws[i * size : (i + 1) * size])
        for i, scale in enumerate(stored)
    ]
    packed = planes.pack(np.concatenate([np.zeros(0, dtype=np.int64), *parts]), bits, bucket)
    return np.concatenate([stored.view(np.uint8), packed])


def decode(body: np.ndarray, numel: int, top: int, bits: int, bucket: int | None) -> np.ndarray:
    """((code − top/2)·(2/top))·scale, each product rounded to float32."""
    count = -(-numel // bucket) if bucket else min(numel, 1)
    scales = body[: 4 * count].view("<f4")
    levels = planes.unpack(body[4 * count :], numel, bits, bucket).astype(np.float32) - np.float32(top / 2)
    return levels * np.float32(2 / top) * scales[np.arange(numel) // (bucket or max(numel, 1))]
