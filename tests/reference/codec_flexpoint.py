"""Köster et al. 2017: round(x/2^e) as integers of `bits` bits, one exponent e for all."""

from __future__ import annotations

import math

import numpy as np


def encode_body(x: np.ndarray, bits: int, exponent: int | None) -> np.ndarray:
    if exponent is None:
        peak = float(np.abs(x).max(initial=0.0))
        exponent = max(math.frexp(peak)[1] - (bits - 1), -149)
    limit = 2 ** (bits - 1) - 1
    mantissas = np.clip(np.rint(x.astype(np.float64) * 2.0**-exponent), -limit, limit)
    return np.concatenate(
        [np.array([exponent], dtype="<i4").view(np.uint8), mantissas.astype(f"<i{bits // 8}").view(np.uint8)]
    )


def decode_body(body: np.ndarray, numel: int, bits: int, exponent: int | None) -> np.ndarray:
    sent = int(body[:4].view("<i4")[0])
    return (body[4:].view(f"<i{bits // 8}").astype(np.float64) * 2.0**sent).astype(np.float32)
