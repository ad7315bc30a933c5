"""Tabulate a shrunk model layer by layer, as Deep Compression does.

Callers: `Shrunk.report`, `laconic inspect`. Sizes are the file's: what a layer takes of it, codebook included.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from laconic.shrinking.coder import chunks
from laconic.shrinking.file import Reader
from laconic.shrinking.parts import Shared
from laconic.text_table import aligned

HEADINGS = ("layer", "weights", "kept %", "weight bits", "index bits", "bytes", "ratio")


@dataclass(frozen=True)
class ShrinkRow:
    """One tensor.

    Attributes:
        name: of the tensor.
        weights: its elements.
        kept: the share of weights that are not zero; 1 for all but matrices, filters and the like.
        weight_bits: coded bits of a kept weight's value, codebook included.
        index_bits: coded bits of its place.
        nbytes: of its payload in the file.
        dense_nbytes: of the tensor.
        is_weight: it has two dimensions or more, unlike biases.
    """

    name: str
    weights: int
    kept: float
    weight_bits: float
    index_bits: float
    nbytes: int
    dense_nbytes: int
    is_weight: bool

    @property
    def reduction_factor(self) -> float:
        """dense_nbytes / nbytes."""
        return self.dense_nbytes / max(1, self.nbytes)

    def cells(self) -> list[str]:
        """As a table shows it."""
        bits = [f"{self.weight_bits:.2f}", f"{self.index_bits:.2f}"]
        return [self.name, f"{self.weights:,}", f"{100 * self.kept:.2f}", *bits, f"{self.nbytes:,}",
                f"{self.reduction_factor:.1f}×"]  # fmt: skip


@dataclass(frozen=True)
class Report:
    """A file: its rows, the bytes of all of it, and what its writer wrote about it."""

    rows: tuple[ShrinkRow, ...]
    file_nbytes: int
    about: Mapping[str, object]

    @property
    def dense_nbytes(self) -> int:
        """Bytes of all tensors, uncoded."""
        return sum(row.dense_nbytes for row in self.rows)

    @property
    def reduction_factor(self) -> float:
        """dense_nbytes / file_nbytes."""
        return self.dense_nbytes / max(1, self.file_nbytes)

    @property
    def density(self) -> float:
        """The share of weights that are kept, biases and the like left out; 1 where there are no weights."""
        weights = [row for row in self.rows if row.is_weight]
        return sum(r.kept * r.weights for r in weights) / max(1, sum(r.weights for r in weights)) if weights else 1.0

    @property
    def errors(self) -> str:
        """The error and that of the dense model, where they were judged."""
        error, dense = self.about.get("error"), self.about.get("dense_error")
        if not isinstance(error, int | float) or not isinstance(dense, int | float):
            return ""  # a file may say anything of itself
        return f"error {error:.4g}, dense {dense:.4g}"

    def table(self) -> list[list[str]]:
        """The rows as text, then the whole file."""
        rest = self.file_nbytes - sum(row.nbytes for row in self.rows)
        total = [f"{sum(r.weights for r in self.rows):,}", f"{100 * self.density:.2f}", "", ""]
        return [
            *[row.cells() for row in self.rows],
            ["header", "", "", "", "", f"{rest:,}", ""],
            ["whole file", *total, f"{self.file_nbytes:,}", f"{self.reduction_factor:.1f}×"],
        ]

    def __str__(self) -> str:
        return "\n".join(aligned([HEADINGS, *self.table()]) + [self.errors] * bool(self.errors))


def report(reader: Reader) -> Report:
    """Tabulate a file. Cost: weights are decoded, and the places of pruned ones are coded once more alone."""
    rows = []
    for name, entry in reader.entries.items():
        is_weight = len(entry.shape) > 1
        kept, weight_bits, index_bits = 1.0, 8 * entry.nbytes / max(1, entry.numel), 0.0
        if entry.coding == "shared":
            part = reader.part(name)
            assert isinstance(part, Shared)
            places = (part.symbols > 0).reshape(chunks.matrix_shape(entry.shape)).astype(np.uint8)
            nonzero = max(1, int(places.sum()))
            index_nbytes = sum(map(len, chunks.encode(places, 1)))
            kept, index_bits = part.density, 8 * index_nbytes / nonzero
            weight_bits = 8 * (entry.nbytes - index_nbytes) / nonzero
        elif is_weight and entry.numel:
            kept = int(reader.tensor(name).count_nonzero()) / entry.numel
        rows.append(
            ShrinkRow(name, entry.numel, kept, weight_bits, index_bits, entry.nbytes, entry.dense_nbytes, is_weight)
        )
    return Report(tuple(rows), reader.nbytes, reader.about)
