"""Scales and nearest levels, for the 8-bit references: brute force over every level, in float64 from float32 values."""

from __future__ import annotations

import numpy as np

F = np.float32


def blocks(numel: int, block: int | None) -> list[slice]:
    size = block or max(numel, 1)
    return [slice(start, start + size) for start in range(0, numel, size)]


def power_for(scale: np.float32) -> np.float32:
    """Brings scales near the ends of float32's range to where their inverse is a normal number."""
    return F(2.0**64) if scale < F(2.0**-100) else F(2.0**-64) if scale > F(2.0**100) else F(1)


def normalised(x: np.ndarray, scale: np.float32, top: float = 1.0) -> np.ndarray:
    """top · x / scale, in float32 and by a multiplication with the inverse."""
    power = power_for(scale)
    inverse = F(top) / F(scale * power) if scale > 0 else F(0)
    return (x * power) * inverse


def nearest(v: np.ndarray, levels: np.ndarray, ties_to_even: bool) -> np.ndarray:
    """The index of the nearest level to each v ≥ 0; halfway, the higher index, or the even one."""
    distance = np.abs(v.astype(np.float64)[:, None] - levels.astype(np.float64)[None])
    low = distance.argmin(axis=1)  # the first of equals
    high = len(levels) - 1 - distance[:, ::-1].argmin(axis=1)  # the last of equals
    return np.where(low % 2 == 0, low, high) if ties_to_even else high


def encode_body(x, levels, block, fixed_scale=None, ties_to_even=False) -> np.ndarray:
    levels = np.asarray(levels, np.float64).astype(F)
    scales, codes = [], []
    for part in blocks(x.size, block if fixed_scale is None else None):
        scale = np.abs(x[part]).max() if fixed_scale is None else F(fixed_scale)
        with np.errstate(over="ignore"):  # values past a fixed scale may overflow: the nearest level is the last
            v = np.minimum(normalised(np.abs(x[part]), scale), F(2))
        scales.append(scale)
        codes.append(nearest(v, levels, ties_to_even) + 128 * np.signbit(x[part]))
    return np.frombuffer(
        np.array(scales, "<f4").tobytes() + np.concatenate([*codes, []]).astype(np.uint8).tobytes(), np.uint8
    )


def decode_body(body, numel, levels, block, fixed=False) -> np.ndarray:
    levels = np.asarray(levels, np.float64).astype(F)
    parts = blocks(numel, None if fixed else block)
    scales = np.frombuffer(body[: 4 * len(parts)].tobytes(), "<f4")
    codes = body[4 * len(parts) :]
    out = np.empty(numel, F)
    for scale, part in zip(scales, parts, strict=True):
        magnitude = levels[np.minimum(codes[part] % 128, len(levels) - 1)]
        out[part] = np.where(codes[part] < 128, magnitude, -magnitude) * scale
    return out
