"""round(7·x/scale), by block."""

from __future__ import annotations

from reference import fourbit

LEVELS = [k / 7 for k in range(8)]


def encode_body(x, block):
    return fourbit.encode(x, LEVELS, block)


def decode_body(body, numel, block):
    return fourbit.decode(body, numel, LEVELS, block)
