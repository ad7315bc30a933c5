"""Zhou et al. 2016, eq. 12: 2M·[q_k(x/2M + 1/2 + U(−½, ½)/(2^k − 1)) − 1/2]: rounding dithered by U is ⌊· + u⌋."""

from __future__ import annotations

import numpy as np

from reference import levels, planes


def encode_body(x: np.ndarray, bits: int, bucket: int | None, draws: np.ndarray) -> np.ndarray:
    parts, _ = planes.buckets(x, bucket)
    return levels.encode(x, [np.abs(part).max() for part in parts], 2**bits - 1, bits, bucket, draws)


def decode_body(body: np.ndarray, numel: int, bits: int, bucket: int | None) -> np.ndarray:
    return levels.decode(body, numel, 2**bits - 1, bits, bucket)
