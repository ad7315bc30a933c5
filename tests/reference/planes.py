"""Slow twins of the layouts and sums that several codecs share: planar words, sums in 64 lanes."""

from __future__ import annotations

import numpy as np


def weights(bits: int) -> list[int]:
    """What a code at each place of a 32-bit word is multiplied by; bits = 0 means trits, five to a byte."""
    if bits:
        return [2 ** (bits * place) for place in range(32 // bits)]
    return [3 ** (place % 5) * 256 ** (place // 5) for place in range(20)]


def groups(numel: int, bucket: int | None, places: int):
    """(start, stop) of every group: a bucket, cut to at most 64 words."""
    for lo in range(0, numel, bucket or max(numel, 1)):
        hi = min(lo + (bucket or numel), numel)
        for start in range(lo, hi, 64 * places):
            yield start, min(start + 64 * places, hi)


def pack(codes: np.ndarray, bits: int, bucket: int | None) -> np.ndarray:
    weight = weights(bits)
    words = []
    for start, stop in groups(codes.size, bucket, len(weight)):
        width = -(-(stop - start) // len(weight))
        group = [0] * width
        for i, code in enumerate(codes[start:stop]):
            group[i % width] += int(code) * weight[i // width]
        words += group
    return np.array(words, dtype="<u4").view(np.uint8)


def unpack(body: np.ndarray, numel: int, bits: int, bucket: int | None) -> np.ndarray:
    weight = weights(bits)
    words = body.view("<u4")
    codes = np.zeros(numel, dtype=np.int64)
    used = 0
    for start, stop in groups(numel, bucket, len(weight)):
        width = -(-(stop - start) // len(weight))
        for i in range(stop - start):
            word = int(words[used + i % width])
            if bits:
                codes[start + i] = word // weight[i // width] % 2**bits
            else:
                byte = word // 256 ** (i // width // 5) % 256
                codes[start + i] = byte // 3 ** (i // width % 5) % 3
        used += width
    return codes


def lane_sum(terms: np.ndarray) -> float:
    """Σ terms in float64: lane j adds terms j, j + 64, …; then the lanes are folded in halves."""
    rows = np.zeros((-(-terms.size // 64), 64))
    rows.reshape(-1)[: terms.size] = terms.astype(np.float64)
    lanes = np.zeros(64)
    for row in rows:
        lanes = lanes + row
    while lanes.size > 1:
        lanes = lanes[: lanes.size // 2] + lanes[lanes.size // 2 :]
    return float(lanes[0])


def chunked_sum(terms: np.ndarray) -> float:
    """A whole tensor's sum: lane sums of chunks of 65536, added in order."""
    total = 0.0
    for start in range(0, terms.size, 65536):
        total = total + lane_sum(terms[start : start + 65536])
    return total


def buckets(x: np.ndarray, bucket: int | None):
    """The buckets of x and the sum that applies to them."""
    if bucket is None:
        return ([x] if x.size else []), chunked_sum
    return [x[start : start + bucket] for start in range(0, x.size, bucket)], lane_sum
