"""The dynamic tree, read bit by bit: leading zeros are the exponent, then a flag, then a bisection of (0.1, upper)."""

from __future__ import annotations

from reference import eightbit


def value(bits: str, upper: float) -> float:
    """The value of seven bits, by walking the tree."""
    if "1" not in bits:
        return 0.0
    n = bits.index("1")
    low, high = 0.1, upper
    for bit in bits[n + 1 :]:
        middle = (low + high) / 2
        low, high = (middle, high) if bit == "1" else (low, middle)
    return (low + high) / 2 / 10**n


def levels(upper: float = 1.0) -> list[float]:
    return [value(f"{code:07b}", upper) for code in range(128)]


def encode_body(x, block=4096, upper=1.0):
    return eightbit.encode_body(x, levels(upper), block)


def decode_body(body, numel, block=4096, upper=1.0):
    return eightbit.decode_body(body, numel, levels(upper), block)
