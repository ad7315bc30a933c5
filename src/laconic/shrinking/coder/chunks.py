"""A matrix of symbols as chunks of at most 65,536, each coded by itself: in parallel, and read one without the others.

Callers: `file.py`, `exact.py`, the report. A chunk is a tile of neighbouring rows and columns rather than a run of
rows: then the model sees a column often enough to learn from it. The tiles follow from the matrix's shape alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import numpy as np

from laconic.codecs import threads
from laconic.errors import PayloadError
from laconic.kernels import Array
from laconic.shrinking.coder.kernels import decode_tile, encode_tile, tables

MOST = 1 << 16  # symbols of a chunk
_TALL = 512  # rows of a tile, at most, where a matrix is wide


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor as a matrix: its first dimension by all others; a vector is one row.

    >>> matrix_shape((20, 1, 5, 5)), matrix_shape((10,)), matrix_shape(())
    ((20, 25), (1, 10), (1, 1))
    """
    if len(shape) < 2:
        return 1, math.prod(shape)
    return shape[0], math.prod(shape[1:])


def tile_shape(rows: int, columns: int) -> tuple[int, int]:
    """The most rows and columns of a tile.

    >>> tile_shape(300, 784), tile_shape(4096, 25088), tile_shape(100_000, 10)
    ((300, 196), (512, 128), (6250, 10))
    """
    if rows * columns <= MOST:
        return max(rows, 1), max(columns, 1)
    height = min(rows, _TALL) if columns > MOST // _TALL else MOST // columns
    height = -(-rows // -(-rows // height))
    width = min(columns, MOST // height)
    return height, -(-columns // -(-columns // width))


def count(rows: int, columns: int) -> int:
    """How many chunks a matrix has."""
    height, width = tile_shape(rows, columns)
    return -(-rows // height) * -(-columns // width) if rows * columns else 0


def _tiles(matrix: Array, shape: tuple[int, int] | None = None) -> Iterator[Array]:
    """Views of a matrix, row of tiles by row of tiles; a part of another matrix has the shape of that one's tiles."""
    rows, columns = matrix.shape
    height, width = shape or tile_shape(rows, columns)
    for top in range(0, rows if matrix.size else 0, height):
        for left in range(0, columns, width):
            yield matrix[top : top + height, left : left + width]


def encode(symbols: Array, levels: int, *, masked: bool = True) -> list[bytes]:
    """The chunks of a matrix of symbols 0 … levels (uint8).

    Args:
        masked: zeros are many and lie in patterns: pruned weights. False: zero is a value like the others.

    Cost: some 25 ns a symbol on one core; each thread of torch's takes its share of the chunks.

    >>> sparse = np.zeros((300, 784), np.uint8)
    >>> sparse[::3, ::7] = 5
    >>> chunks = encode(sparse, 31)
    >>> back = np.empty_like(sparse)
    >>> decode(chunks, back, 31)
    >>> len(chunks), bool((back == sparse).all())
    (4, True)
    """
    tiles = list(_tiles(symbols))
    room = max((2 * tile.size for tile in tiles), default=0) + 64

    def some(start: int, stop: int) -> list[bytes]:
        data, written = np.empty(room, np.uint8), []
        for tile in tiles[start:stop]:
            data[0] = 0  # what a chunk is where all decisions are 1: an empty one could declare anything for nothing
            used = max(1, encode_tile(np.ascontiguousarray(tile), levels, masked, data, *tables()))
            written.append(data[:used].tobytes())
        return written

    return [chunk for part in threads.run(some, len(tiles), min_numel=1) for chunk in part]


def decode(
    chunks: Sequence[bytes | memoryview], out: Array, levels: int, *, masked: bool = True, values: Array | None = None,
    tile: tuple[int, int] | None = None,
) -> None:  # fmt: skip
    """Fill a matrix with the symbols of its chunks, or with values[symbol]; no more than a tile is kept beside it.

    Args:
        tile: the shape of a tile, where `out` is some rows of tiles of a larger matrix, and `chunks` are theirs.

    Raises:
        PayloadError: a chunk is not one of such a matrix.
    """
    tiles = list(_tiles(out, tile))
    if len(tiles) != len(chunks):
        raise PayloadError(f"a matrix of {out.shape[0]} × {out.shape[1]} has {len(tiles)} chunks, not {len(chunks)}")

    def some(start: int, stop: int) -> None:
        room = np.empty(MOST, np.uint8)
        for place in range(start, stop):
            tile = tiles[place]
            symbols = room[: tile.size].reshape(tile.shape)
            data = np.frombuffer(chunks[place], np.uint8)
            if decode_tile(symbols, levels, masked, data, *tables()) < 0:
                raise PayloadError(f"chunk {place} has a symbol beyond {levels}")
            tile[...] = symbols if values is None else values[symbols]

    threads.run(some, len(tiles), min_numel=1)
