"""4-bit floats from their bit patterns, divided by the largest; nearest, ties to the even pattern."""

from __future__ import annotations

from reference import fourbit


def value(code: int, mantissa_bits: int) -> float:
    """Of three bits, exponent and mantissa: m/2·2 below the first power, (1 + m/2)·2ᵉ from it on."""
    exponent, mantissa = divmod(code, 2**mantissa_bits)
    share = mantissa / 2**mantissa_bits
    return 2 * share if exponent == 0 else (1 + share) * 2.0**exponent


LEVELS = {"e2m1": [value(code, 1) for code in range(8)], "e3m0": [value(code, 0) for code in range(8)]}
LEVELS = {name: [v / values[-1] for v in values] for name, values in LEVELS.items()}


def encode_body(x, format, block):
    return fourbit.encode(x, LEVELS[format], block)


def decode_body(body, numel, format, block):
    return fourbit.decode(body, numel, LEVELS[format], block)
