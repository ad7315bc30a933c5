"""NumPy twin of laconic.codecs.random: 32 random bits per index, written in 64-bit arithmetic modulo 2³²."""

from __future__ import annotations

import numpy as np

M32 = np.uint64(0xFFFFFFFF)


def mix64(v: int) -> int:
    v = (v + 0x9E3779B97F4A7C15) % 2**64
    v = (v ^ v >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    v = (v ^ v >> 27) * 0x94D049BB133111EB % 2**64
    return v ^ v >> 31


def key(seed: int, step: int) -> int:
    return mix64(mix64(seed % 2**64) + step)


def bits32(key: int, index: np.ndarray) -> np.ndarray:
    """uint32 draws for an array of indices (or one)."""
    index = np.asarray(index, dtype=np.uint64)
    low, high = np.uint64(int(key) % 2**32), np.uint64(int(key) // 2**32)
    v = ((index & M32) * np.uint64(0x9E3779B9) + low) & M32
    v = (v ^ v >> np.uint64(16)) * np.uint64(0x85EBCA6B) & M32
    v = (v ^ v >> np.uint64(13)) + high + ((index >> np.uint64(32)) * np.uint64(0x7FEB352D) & M32) & M32
    v = v * np.uint64(0xC2B2AE35) & M32
    v = (v ^ v >> np.uint64(16)) * np.uint64(0x846CA68B) & M32
    return (v ^ v >> np.uint64(15)).astype(np.uint32)


def draws(seed: int, step: int, numel: int) -> np.ndarray:
    """The draws of one call to encode, one per element."""
    return bits32(key(seed, step), np.arange(numel))
