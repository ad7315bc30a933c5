"""binary16, little endian, by NumPy's own cast (round to nearest, ties to even)."""

from __future__ import annotations

import numpy as np


def encode_body(x: np.ndarray) -> np.ndarray:
    with np.errstate(over="ignore"):
        return np.frombuffer(x.astype("<f2").tobytes(), dtype=np.uint8)


def decode_body(body: np.ndarray, numel: int) -> np.ndarray:
    return np.frombuffer(body.tobytes(), dtype="<f2", count=numel).astype(np.float32)
