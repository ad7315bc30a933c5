"""Alistarh et al. 2017: N·sgn(x)·ξ/s with s = 2^(bits−1) − 1; a code is s + signed level, so top = 2s."""

from __future__ import annotations

import math

import numpy as np

from reference import levels, planes


def encode_body(x: np.ndarray, bits: int, bucket: int | None, norm: str, draws: np.ndarray) -> np.ndarray:
    parts, total = planes.buckets(x, bucket)
    if norm == "max":
        scales = [np.abs(part).max() for part in parts]
    else:
        largest = float(np.finfo(np.float32).max)
        scales = [min(math.sqrt(total(part.astype(np.float64) ** 2)), largest) for part in parts]
    return levels.encode(x, scales, 2**bits - 2, bits, bucket, draws)


def decode_body(body: np.ndarray, numel: int, bits: int, bucket: int | None, norm: str) -> np.ndarray:
    return levels.decode(body, numel, 2**bits - 2, bits, bucket)
