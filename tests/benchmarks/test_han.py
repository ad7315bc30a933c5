"""Deep Compression's layout, which ours is compared with: it gives back every symbol, and takes more bytes."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings

from benchmarks.shrink import han
from laconic.errors import PayloadError
from laconic.kernels import Array
from laconic.shrinking.coder import chunks
from tests.shrinking.test_coder import drawn_symbols, matrices


@given(matrices())
@settings(max_examples=60)
def test_han_round_trip(case: tuple[Array, int]) -> None:
    symbols, levels = case
    back = han.decode(han.encode(symbols, levels), symbols.size, levels)
    np.testing.assert_array_equal(back, symbols.reshape(-1))


def test_structure_is_found() -> None:
    """Rows and columns of different densities: fewer bytes than gaps and Huffman codes take."""
    rng = np.random.default_rng(0)
    share = np.exp(rng.normal(0, 1.2, (300, 1)) + rng.normal(0, 1.2, (1, 784)))
    symbols = (rng.random((300, 784)) < 0.04 * share / share.mean()).astype(np.uint8)
    assert sum(map(len, chunks.encode(symbols, 1))) < 0.85 * len(han.encode(symbols, 1))


def test_damaged_han_is_refused() -> None:
    good = bytearray(han.encode(drawn_symbols(30, 30, 0.2, 31), 31))
    rng = np.random.default_rng(0)
    for _ in range(200):
        bad = bytearray(good)
        bad[rng.integers(len(bad))] ^= 1 << rng.integers(8)
        try:
            han.decode(bytes(bad[: rng.integers(1, len(bad) + 1)]), 900, 31)
        except PayloadError:
            continue


def test_a_huge_gap_is_bridged() -> None:
    symbols = np.zeros((3, 100_000), np.uint8)
    symbols[2, 99_999] = 31
    np.testing.assert_array_equal(han.decode(han.encode(symbols, 31), symbols.size, 31), symbols.reshape(-1))
