"""Sorted indices as strings of bits, written out one bit at a time."""

from __future__ import annotations

import numpy as np


def to_bytes(bits: list[int]) -> bytes:
    """Bits, the lowest of each byte first, padded with zeros."""
    return np.packbits(np.array(bits, dtype=np.uint8), bitorder="little").tobytes() if bits else b""


def to_bits(data: bytes) -> list[int]:
    return np.unpackbits(np.frombuffer(data, dtype=np.uint8), bitorder="little").tolist()


def width(numel: int, count: int) -> int | None:
    """⌊log₂(numel/count)⌋, or None where a bitmap is no longer than the split form."""
    bits = 0
    while count * 2 ** (bits + 1) <= numel:
        bits += 1
    low = (count * bits + 7) // 8
    high = (count + (numel - 1) // 2**bits + 7) // 8
    return bits if low + high < (numel + 7) // 8 else None


def pack(indices: list[int], numel: int) -> bytes:
    count = len(indices)
    if count == 0:
        return b""
    w = width(numel, count)
    if w is None:
        chosen = set(indices)
        return to_bytes([int(i in chosen) for i in range(numel)])
    low = [index >> bit & 1 for index in indices for bit in range(w)]
    # High parts in unary: a one per index, and before it a zero for every step its high part takes.
    high: list[int] = []
    reached = 0
    for index in indices:
        high += [0] * ((index >> w) - reached) + [1]
        reached = index >> w
    high += [0] * (count + ((numel - 1) >> w) - len(high))
    return to_bytes(low) + to_bytes(high)


def nbytes(numel: int, count: int) -> int:
    return len(pack(list(range(count)), numel))


def unpack(data: bytes, numel: int, count: int) -> list[int]:
    if count == 0:
        return []
    w = width(numel, count)
    if w is None:
        return [i for i, bit in enumerate(to_bits(data)[:numel]) if bit]
    cut = (count * w + 7) // 8
    low, high = to_bits(data[:cut]), to_bits(data[cut:])
    indices, step = [], 0
    for bit in high:
        if bit:
            j = len(indices)
            indices.append(step * 2**w + sum(low[j * w + b] << b for b in range(w)))
        else:
            step += 1
    return indices


def body(indices: list[int], numel: int, values: bytes) -> np.ndarray:
    """A selector's body: count, indices padded to 8 bytes, values."""
    packed = pack(indices, numel)
    packed += bytes(-len(packed) % 8)
    return np.frombuffer(len(indices).to_bytes(8, "little") + packed + values, dtype=np.uint8)


def split_body(data: np.ndarray, numel: int) -> tuple[list[int], bytes]:
    """(indices, values) of a body."""
    raw = data.tobytes()
    count = int.from_bytes(raw[:8], "little")
    size = nbytes(numel, count)
    return unpack(raw[8 : 8 + size], numel, count), raw[8 + size + -size % 8 :]


def signs(values: np.ndarray) -> bytes:
    """A bit per value, set where it is negative."""
    return to_bytes([int(v < 0) for v in values])


def scatter(indices: list[int], values: np.ndarray, numel: int) -> np.ndarray:
    x = np.zeros(numel, dtype=np.float32)
    x[indices] = values
    return x
