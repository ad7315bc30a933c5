"""What other contexts would save of a shrunk file: how far its coder is from what its symbols allow.

    python -m benchmarks profile-contexts model.lac …            a table of each file's larger layers, in bytes

Beside Han's layout and ours: *places*, whether weights were kept, as we code them, and as a coder would that was told
for nothing how many weights every row and column keeps (in five classes each). And *values* of kept weights, as we
code them, with nothing else known, and with the sign known of the kept weight up to three places before. Sums are code
lengths of an adaptive coder that begins with a count of one half for every symbol.
"""

from __future__ import annotations

import argparse
from math import lgamma, log

import numpy as np

from benchmarks.shrink import han
from laconic.kernels import Array
from laconic.shrinking.coder import chunks
from laconic.shrinking.file import Reader
from laconic.shrinking.parts import Shared

FEW = 1500  # kept weights of a layer that is left out: there is little to save
NEAR = 3  # places
HEADS = ("layer", "Han", "ours", "places", "counts told", "values", "nothing known", "sign before")


def code_nbytes(symbols: Array, contexts: Array) -> float:
    """Bytes of symbols, each coded by how often it came before in its context."""
    counts = np.zeros((int(contexts.max()) + 1, int(symbols.max()) + 1))
    np.add.at(counts, (contexts, symbols), 1)
    totals, kinds = counts.sum(1), counts.shape[1]
    nats = sum(lgamma(total + kinds / 2) - lgamma(kinds / 2) for total in totals)
    return float(nats - sum(lgamma(count + 0.5) - lgamma(0.5) for count in counts.flat)) / log(2) / 8


def classes(counts: Array) -> Array:
    """Which fifth each count belongs to."""
    return np.asarray(np.digitize(counts, np.quantile(counts, [0.2, 0.4, 0.6, 0.8])))


def signs_before(symbols: Array, signs: Array) -> Array:
    """Of each kept weight, 1 + the sign of the kept weight before it in its row; 1 where none is near."""
    rows, columns = np.nonzero(symbols)
    before = signs[symbols[rows, columns]][:-1]
    near = (rows[1:] == rows[:-1]) & (columns[1:] - columns[:-1] <= NEAR)
    return np.concatenate([[1], 1 + np.where(near, before, 0)])


def row_of(part: Shared) -> list[float] | None:
    """A layer's sizes in the order of HEADS, or None where it is small or not pruned."""
    symbols = part.symbols.reshape(chunks.matrix_shape(part.symbols.shape))
    kept = symbols > 0
    if not part.masked or kept.sum() < FEW:
        return None
    ours, places = (
        sum(map(len, chunks.encode(each, levels))) for each, levels in ((symbols, part.levels), (kept * np.uint8(1), 1))
    )
    told = 5 * classes(kept.sum(1))[:, None] + classes(kept.sum(0))[None, :]
    values = symbols[kept].astype(np.int64) - 1
    before = signs_before(symbols, np.sign(part.values).astype(np.int64))
    return [
        len(han.encode(symbols, part.levels)), ours, places, code_nbytes(kept.astype(np.int64).ravel(), told.ravel()),
        ours - places, code_nbytes(values, np.zeros_like(values)), code_nbytes(values, before),
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+")
    for path in parser.parse_args().files:
        reader = Reader(path)
        print(f"{path}, {reader.nbytes:,} bytes\n  {'  '.join(f'{head:>13}' for head in HEADS)}")
        parts = {name: part for name in reader.entries if isinstance(part := reader.part(name), Shared)}
        rows = {name: row for name, part in parts.items() if (row := row_of(part)) is not None}
        for name, row in {**rows, "together": list(map(sum, zip(*rows.values(), strict=True)))}.items():
            print(f"  {name:>13}  {'  '.join(f'{value:13,.0f}' for value in row)}")
