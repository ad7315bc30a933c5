"""bfloat16: the upper half of a float32, rounded to nearest, ties to even (for what is not NaN)."""

from __future__ import annotations

import numpy as np


def encode_body(x: np.ndarray) -> np.ndarray:
    bits = x.astype("<f4").view("<u4").astype(np.uint64)
    upper, lower = bits >> np.uint64(16), bits & np.uint64(0xFFFF)
    half = np.uint64(0x8000)
    round_up = (lower > half) | ((lower == half) & (upper % np.uint64(2) == 1))
    return np.frombuffer((upper + round_up).astype("<u2").tobytes(), dtype=np.uint8)


def decode_body(body: np.ndarray, numel: int) -> np.ndarray:
    upper = np.frombuffer(body.tobytes(), dtype="<u2", count=numel)
    return (upper.astype(np.uint32) << np.uint32(16)).view(np.float32)
