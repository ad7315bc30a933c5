"""All different numbers m · 10⁻ⁿ (m < 16, n < 8) over 15, in ascending order."""

from __future__ import annotations

from fractions import Fraction

from reference import eightbit

LEVELS = [float(v) for v in sorted({Fraction(m, 15 * 10**n) for m in range(16) for n in range(8)})]


def encode_body(x, block=4096, offset=None):
    return eightbit.encode_body(x, LEVELS, block, None if offset is None else 15 * 10.0**offset)


def decode_body(body, numel, block=4096, offset=None):
    return eightbit.decode_body(body, numel, LEVELS, block, offset is not None)
