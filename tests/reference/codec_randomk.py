"""randomk: Floyd's sampling with a Python set; the generator's key stands in the body in place of indices."""

from __future__ import annotations

import numpy as np

from reference import counter_random, index_packing
from reference.codec_topk import k_of


def select(key: int, numel: int, count: int) -> list[int]:
    chosen: set[int] = set()
    draws = counter_random.bits32(key, np.arange(2 * count)).tolist()
    for t in range(count):
        j = numel - count + t
        uniform = (draws[2 * t] * 2**21 + draws[2 * t + 1] // 2**11) * 2.0**-53
        i = min(int(uniform * (j + 1)), j)
        chosen.add(j if i in chosen else i)
    return sorted(chosen)


def encode_body(x: np.ndarray, fraction: float, scaled: bool, key: int) -> np.ndarray:
    count = k_of(fraction, x.size)
    key = counter_random.mix64(int(key) ^ int.from_bytes(b"choosing", "big"))
    values = x[select(key, x.size, count)].astype("<f4")
    if scaled and count:
        with np.errstate(over="ignore"):
            values = values * np.float32(x.size / count)
        values = np.clip(values, -np.finfo(np.float32).max, np.finfo(np.float32).max)
    raw = count.to_bytes(8, "little") + int(key).to_bytes(8, "little") + values.tobytes()
    return np.frombuffer(raw, dtype=np.uint8)


def decode_body(body: np.ndarray, numel: int, fraction: float, scaled: bool) -> np.ndarray:
    raw = body.tobytes()
    count, key = int.from_bytes(raw[:8], "little"), int.from_bytes(raw[8:16], "little")
    return index_packing.scatter(select(key, numel, count), np.frombuffer(raw[16:], "<f4"), numel)
