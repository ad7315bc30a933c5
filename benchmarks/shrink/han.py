"""The layout of Deep Compression: gaps between kept weights in 5 bits, codebook indices, Huffman codes of both.

Callers: the benchmark and the tests; files are written by `chunks.py`, which takes fewer bytes. A gap of more than 31
zeros is bridged by fillers, kept weights of symbol 0. Gaps and symbols each have their table of code lengths, 4 bits a
length, and four streams of `codecs.huffman`.

Source: Han, Mao, Dally, Deep Compression, ICLR 2016, §2 and §4.
Differs: none; the published sizes leave out the tables of the codes, which count here.
"""

from __future__ import annotations

import numpy as np

from laconic.codecs import huffman
from laconic.errors import PayloadError
from laconic.kernels import Array, njit

FAR = 31  # the longest gap


def encode(symbols: Array, levels: int) -> bytes:
    """Symbols 0 … levels (uint8) as gaps and values.

    >>> symbols = np.zeros(1000, np.uint8)
    >>> symbols[[3, 500]] = 2, 1
    >>> bool((decode(encode(symbols, 31), 1000, 31) == symbols).all())
    True
    """
    flat = np.ascontiguousarray(symbols).reshape(-1)
    gaps, values = _gaps(flat)
    return len(gaps).to_bytes(8, "little") + huffman.pack(gaps, FAR + 1) + huffman.pack(values, levels + 1)


def decode(data: bytes, numel: int, levels: int) -> Array:
    """The symbols that `encode` was given.

    Raises:
        PayloadError: it is not what `encode` writes.
    """
    kept = int.from_bytes(data[:8], "little")
    if kept > numel:
        raise PayloadError(f"{kept} gaps for {numel} weights")
    gaps, used = huffman.unpack(np.frombuffer(data, np.uint8)[8:], FAR + 1, kept)
    values, _ = huffman.unpack(np.frombuffer(data, np.uint8)[8 + used :], levels + 1, kept)
    places = np.cumsum(gaps.astype(np.int64) + 1) - 1
    if kept and places[-1] >= numel:
        raise PayloadError(f"the gaps lead to place {places[-1]} of {numel}")
    symbols = np.zeros(numel, np.uint8)
    symbols[places] = values
    return symbols


@njit(nogil=True, cache=True)
def _gaps(symbols: Array) -> tuple[Array, Array]:
    """Zeros before each kept weight and its symbol, fillers included."""
    gaps, values = np.empty(symbols.size, np.uint8), np.empty(symbols.size, np.uint8)
    kept, gap = 0, 0
    for i in range(symbols.size):
        if symbols[i] or gap == FAR:
            gaps[kept], values[kept] = gap, symbols[i]
            kept += 1
            gap = 0
        else:
            gap += 1
    return gaps[:kept], values[:kept]
