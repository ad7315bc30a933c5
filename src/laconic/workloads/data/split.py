"""A dataset in memory: two splits of samples, each indexable by a tensor of sample numbers.

Images stay uint8 until they are batched, so that eight workers on one machine hold 47 MB of MNIST each and not 188.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor


class SparseBatch(NamedTuple):
    """Rows of a sparse matrix, as `torch.nn.functional.embedding_bag` takes them.

    Attributes:
        columns: the column of every stored value, row after row (int64).
        offsets: where each row starts in `columns` (int64, one per row).
        values: the stored values (float32).
    """

    columns: Tensor
    offsets: Tensor
    values: Tensor


@dataclass(frozen=True)
class SparseRows:
    """A sparse matrix by rows; indexing it with row numbers gathers a `SparseBatch` without a loop.

    >>> rows = SparseRows(torch.tensor([0, 2, 2, 3]), torch.tensor([0, 4, 1]), torch.tensor([1.0, 2.0, 3.0]), 5)
    >>> batch = rows[torch.tensor([2, 0])]
    >>> batch.columns.tolist(), batch.offsets.tolist(), batch.values.tolist()
    ([1, 0, 4], [0, 1], [3.0, 1.0, 2.0])

    Attributes:
        starts: row r holds the stored values starts[r] to starts[r + 1] (int64, rows + 1).
        columns: column of every stored value (int64).
        values: the stored values (float32).
        width: columns of the matrix.
    """

    starts: Tensor
    columns: Tensor
    values: Tensor
    width: int

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, rows: Tensor) -> SparseBatch:
        first = self.starts[rows]
        lengths = self.starts[rows + 1] - first
        offsets = torch.cumsum(lengths, 0) - lengths
        places = torch.arange(int(lengths.sum())) + torch.repeat_interleave(first - offsets, lengths)
        return SparseBatch(self.columns[places], offsets, self.values[places])


@dataclass(frozen=True)
class Split:
    """Samples and what is to be predicted for each: `x[i]` and `y[i]` for a tensor `i` of sample numbers."""

    x: Tensor | SparseRows
    y: Tensor

    def __len__(self) -> int:
        return len(self.y)


@dataclass(frozen=True)
class Dataset:
    """A dataset in memory.

    Attributes:
        name: as given to `load`.
        title: as a report names it.
        source: where it was read: a folder, an address, or what made it.
        train: what is trained on.
        test: what accuracy is measured on, never trained on.
    """

    name: str
    title: str
    source: str
    train: Split
    test: Split


def held_out(samples: int, fraction: float, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Sample numbers (train, test) of a fixed random split, for datasets that come without one.

    The split depends on nothing but the arguments: every run, seed and rank tests on the same samples.
    """
    order = np.random.default_rng([0x5711, seed, samples]).permutation(samples)
    test = round(samples * fraction)
    return torch.from_numpy(np.sort(order[test:])), torch.from_numpy(np.sort(order[:test]))
