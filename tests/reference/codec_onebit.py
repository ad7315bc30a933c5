"""Seide et al. 2014: sign bits; per bucket the mean of the values ≥ 0 and the mean of those < 0."""

from __future__ import annotations

import numpy as np

from reference import planes


def encode_body(x: np.ndarray, bucket: int | None) -> np.ndarray:
    parts, total = planes.buckets(x, bucket)
    means = []
    for part in parts:
        wide = part.astype(np.float64)
        for side in (part >= 0, part < 0):
            count = int(side.sum())
            means.append(total(np.where(side, wide, 0.0)) / count if count else 0.0)
    scales = np.array(means, dtype="<f4").view(np.uint8)
    return np.concatenate([scales, planes.pack(x < 0, 1, bucket)])


def decode_body(body: np.ndarray, numel: int, bucket: int | None) -> np.ndarray:
    count = 2 * (-(-numel // bucket) if bucket else min(numel, 1))
    means = body[: 4 * count].view("<f4").reshape(-1, 2)
    below = planes.unpack(body[4 * count :], numel, 1, bucket)
    which = np.arange(numel) // (bucket or max(numel, 1))
    return means[which, below]
