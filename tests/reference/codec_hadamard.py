"""Hadamard's matrix along the columns of tiles, by halves, and another reference for what is rotated."""

from __future__ import annotations

import dataclasses
import importlib

import numpy as np


def tiles(numel: int, block: int):
    """(start, rows, columns) of every tile."""
    for lo in range(0, numel, block * block):
        left, rows, at = min(block * block, numel - lo), block, lo
        while left:
            if columns := left // rows:
                yield at, rows, columns
            at, left, rows = at + rows * columns, left - rows * columns, max(rows // 4, 1)


def hadamard(tile: np.ndarray) -> np.ndarray:
    """H·tile, the sums of halves first."""
    if len(tile) == 1:
        return tile
    top, bottom = np.split(tile, 2)
    return np.concatenate([hadamard(top + bottom), hadamard(top - bottom)])


def root(rows: int, block: int) -> np.float32:
    """√(rows·block), rounded up to a power of two."""
    return np.float32(2.0 ** np.ceil(np.log2(rows * block) / 2))


def rotated(x: np.ndarray, block: int, back: bool = False) -> np.ndarray:
    """H·x/√(rows·n) of every tile, or back."""
    out = np.zeros_like(x)
    for start, rows, columns in tiles(x.size, block):
        tile = x[start : start + rows * columns].reshape(rows, columns)
        share = np.float32(1 / rows) if back else np.float32(1) / root(rows, block)
        out[start : start + tile.size] = hadamard(tile * share).reshape(-1)
    return out


def _inner(inner):
    options = {field.name: getattr(inner, field.name) for field in dataclasses.fields(inner)}
    return importlib.import_module(f"reference.codec_{inner.name}"), options


def encode_body(x, block, inner):
    module, options = _inner(inner)
    return module.encode_body(rotated(x, block), **options)


def decode_body(body, numel, block, inner):
    module, options = _inner(inner)
    y, most = np.asarray(module.decode_body(body, numel, **options), np.float32), np.finfo("<f4").max
    y = rotated(y, block, back=True)
    for start, rows, columns in tiles(numel, block):
        with np.errstate(over="ignore"):
            y[start : start + rows * columns] *= root(rows, block)
    return np.clip(y, -most, most)
