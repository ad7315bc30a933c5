"""The static tree: exponent field 7 − n, then four steps of bisection of (0.1, 1); the all-zero code is 0."""

from __future__ import annotations

from reference import eightbit


def value(bits: str) -> float:
    n = 7 - int(bits[:3], 2)
    low, high = 0.1, 1.0
    for bit in bits[3:]:
        middle = (low + high) / 2
        low, high = (middle, high) if bit == "1" else (low, middle)
    return (low + high) / 2 / 10**n


LEVELS = [0.0] + [value(f"{code:07b}") for code in range(1, 128)]


def encode_body(x, block=4096, offset=None):
    return eightbit.encode_body(x, LEVELS, block, None if offset is None else 10.0**offset)


def decode_body(body, numel, block=4096, offset=None):
    return eightbit.decode_body(body, numel, LEVELS, block, offset is not None)
