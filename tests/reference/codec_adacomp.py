"""AdaComp: G = residual + gradient, H = G + gradient; send where |H| reaches the bin's max of |G|."""

from __future__ import annotations

import numpy as np

from reference import index_packing


def mean(values: list[float]) -> np.float32:
    total = 0.0
    for value in values:
        total += float(value)
    return np.float32(total / max(1, len(values)))


def encode_two(g: np.ndarray, gradient: np.ndarray, bin: int, scale: str) -> np.ndarray:
    """The body for G and the gradient that is part of it."""
    chosen, maxima = [], []
    with np.errstate(over="ignore"):
        h = g + gradient
    for start in range(0, g.size, bin):
        most = np.abs(g[start : start + bin]).max()
        maxima.append(most)
        places = range(start, min(g.size, start + bin))
        chosen += [i for i in places if most > 0 and g[i] != 0 and abs(h[i]) >= most]
    s = mean(list(np.abs(g[chosen])) if scale == "sent" else maxima)
    return index_packing.body(chosen, g.size, s.tobytes() + index_packing.signs(g[chosen]))


def encode_body(x: np.ndarray, bin: int, scale: str) -> np.ndarray:
    return encode_two(x, x, bin, scale)


def decode_body(body: np.ndarray, numel: int, bin: int, scale: str) -> np.ndarray:
    chosen, values = index_packing.split_body(body, numel)
    s = np.frombuffer(values[:4], "<f4")[0]
    negative = np.array(index_packing.to_bits(values[4:])[: len(chosen)], dtype=bool)
    return index_packing.scatter(chosen, np.where(negative, -s, s), numel)
