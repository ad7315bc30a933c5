"""Karimireddy et al. 2019: ± the mean magnitude of the bucket."""

from __future__ import annotations

import numpy as np

from reference import planes


def encode_body(x: np.ndarray, bucket: int | None) -> np.ndarray:
    parts, total = planes.buckets(x, bucket)
    means = [total(np.abs(part.astype(np.float64))) / part.size for part in parts]
    return np.concatenate([np.array(means, dtype="<f4").view(np.uint8), planes.pack(x < 0, 1, bucket)])


def decode_body(body: np.ndarray, numel: int, bucket: int | None) -> np.ndarray:
    count = -(-numel // bucket) if bucket else min(numel, 1)
    scale = body[: 4 * count].view("<f4")[np.arange(numel) // (bucket or max(numel, 1))]
    below = planes.unpack(body[4 * count :], numel, 1, bucket)
    return np.where(below == 1, -scale, scale).astype(np.float32)
