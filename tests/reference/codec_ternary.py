"""Wen et al. 2017: s·sgn(x)·b, P(b = 1) = |x|/s; s = max |x|, or no more than clip times the root mean square."""

from __future__ import annotations

import math

import numpy as np

from reference import levels, planes


def encode_body(x: np.ndarray, clip: float | None, bucket: int | None, draws: np.ndarray) -> np.ndarray:
    parts, total = planes.buckets(x, bucket)
    scales = []
    for part in parts:
        wide = part.astype(np.float64)
        scale = float(np.abs(wide).max())
        if clip is not None:
            scale = min(scale, clip * math.sqrt(total(wide * wide) / part.size))
        scales.append(scale)
    return levels.encode(x, scales, 2, 0, bucket, draws)


def decode_body(body: np.ndarray, numel: int, clip: float | None, bucket: int | None) -> np.ndarray:
    return levels.decode(body, numel, 2, 0, bucket)
