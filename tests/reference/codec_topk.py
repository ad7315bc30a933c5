"""topk: sort by magnitude, ties by index, keep the first k."""

from __future__ import annotations

import numpy as np

from reference import index_packing


def k_of(fraction: float, numel: int) -> int:
    if numel == 0:
        return 0
    return min(numel, fraction if fraction >= 1 else max(1, round(fraction * numel)))


def select(x: np.ndarray, fraction: float, bucket: int | None) -> list[int]:
    chosen: list[int] = []
    size = bucket or max(1, x.size)
    for start in range(0, x.size, size):
        part = np.abs(x[start : start + size])
        order = sorted(range(part.size), key=lambda i: (-part[i], i))
        chosen += sorted(start + i for i in order[: k_of(fraction, part.size)])
    return chosen


def encode_body(x: np.ndarray, fraction: float, bucket: int | None) -> np.ndarray:
    chosen = select(x, fraction, bucket)
    return index_packing.body(chosen, x.size, x[chosen].astype("<f4").tobytes())


def decode_body(body: np.ndarray, numel: int, fraction: float, bucket: int | None) -> np.ndarray:
    chosen, values = index_packing.split_body(body, numel)
    return index_packing.scatter(chosen, np.frombuffer(values, "<f4"), numel)
