"""Sign and the nearest of eight magnitudes, brute force, for the 4-bit references; packed in planes."""

from __future__ import annotations

import numpy as np

from reference import eightbit, planes


def encode(x, levels, block) -> np.ndarray:
    levels = np.asarray(levels, np.float64).astype(np.float32)
    scales, codes = [], [np.zeros(0, np.int64)]
    for part in eightbit.blocks(x.size, block):
        scale = np.abs(x[part]).max()
        v = eightbit.normalised(np.abs(x[part]), scale)
        scales.append(scale)
        codes.append(eightbit.nearest(v, levels, True) + 8 * np.signbit(x[part]))
    packed = planes.pack(np.concatenate(codes), 4, block)
    return np.concatenate([np.array(scales, "<f4").view(np.uint8), packed])


def decode(body, numel, levels, block) -> np.ndarray:
    levels = np.asarray(levels, np.float64).astype(np.float32)
    count = -(-numel // block)
    scales = body[: 4 * count].view("<f4")[np.arange(numel) // block]
    codes = planes.unpack(body[4 * count :], numel, 4, block)
    return np.where(codes < 8, levels[codes % 8], -levels[codes % 8]) * scales
