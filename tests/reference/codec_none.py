"""float32, little endian."""

from __future__ import annotations

import numpy as np


def encode_body(x: np.ndarray) -> np.ndarray:
    return np.frombuffer(x.astype("<f4").tobytes(), dtype=np.uint8)


def decode_body(body: np.ndarray, numel: int) -> np.ndarray:
    return np.frombuffer(body.tobytes(), dtype="<f4", count=numel)
