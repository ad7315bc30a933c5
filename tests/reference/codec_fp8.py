"""8-bit floats from their bit patterns, divided by the largest finite one; nearest, ties to the even pattern."""

from __future__ import annotations

from reference import eightbit


def value(code: int, exponent_bits: int, mantissa_bits: int) -> float:
    text = f"{code:07b}"
    exponent, mantissa = int(text[:exponent_bits], 2), int(text[exponent_bits:], 2)
    bias = 2 ** (exponent_bits - 1) - 1
    lead, power = (0, 1 - bias) if exponent == 0 else (1, exponent - bias)
    return (lead + mantissa / 2**mantissa_bits) * 2.0**power


FINITE = {
    "e4m3": [value(code, 4, 3) for code in range(0b1111111)],
    "e5m2": [value(code, 5, 2) for code in range(0b1111100)],
}
LEVELS = {name: [v / values[-1] for v in values] for name, values in FINITE.items()}


def encode_body(x, format="e4m3", block=4096):
    return eightbit.encode_body(x, LEVELS[format], block, ties_to_even=True)


def decode_body(body, numel, format="e4m3", block=4096):
    return eightbit.decode_body(body, numel, LEVELS[format], block)
