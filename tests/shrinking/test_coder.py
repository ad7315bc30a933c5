"""Every coder gives back every symbol, in few bytes, whatever the shape and however many threads."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import PayloadError
from laconic.kernels import Array
from laconic.shrinking.coder import chunks, exact
from laconic.shrinking.coder.kernels import FURTHEST, decode_tile, encode_tile, tables
from tests.reference.shrink_coder import code_length


def drawn_symbols(rows: int, columns: int, density: float, levels: int, seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    kept = rng.random((rows, columns)) < density
    return (kept * rng.integers(1, levels + 1, (rows, columns))).astype(np.uint8)


@st.composite
def matrices(draw: st.DrawFn) -> tuple[Array, int]:
    levels = draw(st.sampled_from([1, 2, 3, 8, 31, 32, 255]))
    rows, columns = draw(st.integers(0, 40)), draw(st.integers(0, 70))
    density = draw(st.sampled_from([0.0, 0.01, 0.3, 1.0]))
    return drawn_symbols(rows, columns, density, levels, draw(st.integers(0, 1 << 30))), levels


@given(matrices(), st.booleans())
@settings(max_examples=120)
def test_chunks_round_trip(case: tuple[Array, int], masked: bool) -> None:
    symbols, levels = case
    coded = chunks.encode(symbols, levels, masked=masked)
    back = np.full_like(symbols, 99)
    chunks.decode(coded, back, levels, masked=masked)
    np.testing.assert_array_equal(back, symbols)


def test_a_huge_gap_and_one_element() -> None:
    symbols = np.zeros((3, 100_000), np.uint8)
    symbols[2, 99_999] = 31
    back = np.empty_like(symbols)
    coded = chunks.encode(symbols, 31)
    chunks.decode(coded, back, 31)
    np.testing.assert_array_equal(back, symbols)
    assert sum(map(len, coded)) < 60
    one = np.array([[7]], np.uint8)
    chunks.decode(chunks.encode(one, 7), back[:1, :1], 7)
    assert back[0, 0] == 7


DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.int64, torch.uint8]


@given(st.integers(0, 1 << 30), st.sampled_from(DTYPES))
@settings(max_examples=40)
def test_exact_gives_back_every_bit(seed: int, dtype: torch.dtype) -> None:
    rng = np.random.default_rng(seed)
    raw = torch.from_numpy(rng.integers(0, 256, rng.integers(1, 300) * 8, dtype=np.uint8))
    raw[: raw.numel() // 2] &= 3
    tensor = raw.view(dtype)
    back = exact.decode(*exact.encode(tensor), torch.empty_like(tensor))
    assert torch.equal(back.view(torch.uint8), raw)


def test_exact_shortens_weights() -> None:
    """The exponents of normal values take some 2.6 bits of 8: float32 in 26.6 bits, bfloat16 in fewer than 11."""
    x = torch.randn(200_000, generator=torch.Generator().manual_seed(0)) * 0.02
    for tensor, most in ((x, 0.85), (x.bfloat16(), 0.70)):
        pieces, _ = exact.encode(tensor)
        assert sum(map(len, pieces)) < most * tensor.numel() * tensor.element_size()


def test_bytes_do_not_depend_on_threads() -> None:
    symbols = drawn_symbols(600, 900, 0.07, 31)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 3):
            torch.set_num_threads(threads)
            found.append(chunks.encode(symbols, 31))
    finally:
        torch.set_num_threads(before)
    assert found[0] == found[1]
    assert len(found[0]) > 3


@pytest.mark.parametrize(("density", "levels"), [(0.04, 31), (0.3, 7), (0.001, 1)])
def test_length_is_near_the_entropy(density: float, levels: int) -> None:
    """Symbols without structure cost their entropy and a few per cent to learn it."""
    symbols = drawn_symbols(256, 256, density, levels)
    share = np.count_nonzero(symbols) / symbols.size
    bits = -symbols.size * (share * np.log2(share) + (1 - share) * np.log2(1 - share))
    bits += np.count_nonzero(symbols) * np.log2(levels)
    nbytes = sum(map(len, chunks.encode(symbols, levels)))
    assert bits / 8 <= nbytes * 1.002
    assert nbytes <= 1.04 * bits / 8 + 40


def test_tile_matches_the_reference() -> None:
    """The same probabilities, written anew from the description, give the same length within a byte or two."""
    symbols = drawn_symbols(30, 40, 0.2, 5)
    data = np.empty(2 * symbols.size + 64, np.uint8)
    used = encode_tile(symbols, 5, True, data, *tables())
    bits = code_length(symbols.tolist(), 5, [t.tolist() for t in tables()], FURTHEST)
    assert abs(8 * used - bits) <= 16


def test_constriction_agrees_on_the_length() -> None:
    """For one symbol in two with known odds, the range coder of another package takes as many bytes."""
    constriction = pytest.importorskip("constriction", reason="pip install 'laconic[dev]' brings the oracle")
    symbols = drawn_symbols(256, 256, 0.1, 1)
    model = constriction.stream.model.Bernoulli(float(symbols.mean()), perfect=False)
    encoder = constriction.stream.queue.RangeEncoder()
    encoder.encode(symbols.reshape(-1).astype(np.int32), model)
    assert sum(map(len, chunks.encode(symbols, 1))) <= 1.04 * encoder.num_bits() / 8


def test_a_symbol_beyond_the_levels_is_refused() -> None:
    """Of 20 levels in a tree of 32, damaged bytes may name a 25th."""
    rng, refused = np.random.default_rng(0), 0
    for _ in range(50):
        out = np.empty((8, 8), np.uint8)
        refused += decode_tile(out, 20, True, rng.integers(0, 256, 40, dtype=np.uint8), *tables()) < 0
        with pytest.raises(PayloadError, match="chunks"):
            chunks.decode([b"1", b"2"], out, 20)
    assert refused > 10
