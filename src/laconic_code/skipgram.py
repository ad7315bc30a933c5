"""Skip-gram with negative sampling, as a Numba kernel: statements that stand near each other get near vectors.

Caller: `laconic code embed`. For a pair of a centre c and a context o, and K statements n drawn at random from the
counts to the power 0.75, a step of rate ρ ascends

    log σ(v_c · u_o) + Σ_n log σ(−v_c · u_n)

at once in v (the vectors that are kept) and u (those of contexts), pair after pair. tests/reference/skipgram.py is its
slow twin. Several workers each train on pairs of their own, and agree block by block: the rows that a block changed are
added up by a sparse all-reduce, so that only these are sent. `distribute` is not used, as it sends whole tables.

Source: Mikolov et al., Distributed Representations of Words and Phrases, NeurIPS 2013, eq. 4.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from laconic.errors import BadInput, PayloadError
from laconic.exchange.sparse import SparseStream, sparse_all_reduce
from laconic.kernels import njit
from laconic.storage import tree
from laconic.transports.world import World

Floats = np.ndarray[Any, np.dtype[np.float32]]
Integers = np.ndarray[Any, np.dtype[np.int32]]
BLOCK = 65_536  # pairs whose negatives are drawn at once
_TABLE = 1 << 20  # places of the table that negatives are drawn from


@dataclass(frozen=True)
class Training:
    """How an embedding is trained.

    Args:
        dim: length of a vector.
        negatives: statements drawn against each pair.
        epochs: passes over the pairs.
        rate: of the first pair; it falls linearly to a hundredth.
        threshold: statements that are more frequent than this lose pairs, as 1 − √(threshold / frequency); 0 keeps all.
        seed: of everything that is drawn.
    """

    dim: int = 200
    negatives: int = 5
    epochs: int = 5
    rate: float = 0.05
    threshold: float = 0.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("dim", "negatives", "epochs"):
            if getattr(self, name) < 1:
                raise BadInput(f"{name} is 1 or more, got {getattr(self, name)}")
        if not 0 < self.rate <= 1 or not 0 <= self.threshold < 1:
            raise BadInput(f"rate is in (0, 1] and threshold in [0, 1), got {self.rate:g} and {self.threshold:g}")


@njit(cache=True, fastmath=True, nogil=True)
def ascend(
    vectors: Floats, contexts: Floats, pairs: Integers, negatives: Integers, rate: np.float32, fall: np.float32
) -> None:
    """Take a step for every pair, in order; the rate begins at `rate` and falls by `fall` a pair."""
    dim = vectors.shape[1]
    change = np.empty(dim, np.float32)
    for p in range(len(pairs)):
        centre = vectors[pairs[p, 0]]
        change[:] = 0
        for k in range(negatives.shape[1] + 1):
            row = pairs[p, 1] if k == 0 else negatives[p, k - 1]
            if k > 0 and row == pairs[p, 1]:
                continue
            context = contexts[row]
            product = np.float32(0)
            for d in range(dim):
                product += centre[d] * context[d]
            share = np.float32(1) / (np.float32(1) + np.float32(math.exp(-product)))
            step = rate * ((np.float32(1) if k == 0 else np.float32(0)) - share)
            for d in range(dim):
                change[d] += step * context[d]
                context[d] += step * centre[d]
        for d in range(dim):
            centre[d] += change[d]
        rate -= fall


def train(
    pairs: Integers,
    size: int,
    how: Training | None = None,
    world: World | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    folder: Path | None = None,
) -> Floats:
    """Vectors of `size` statements from (centre, context) pairs of their numbers.

    Args:
        world: train together with its ranks, each on every P-th pair; all end with the same vectors.
        progress: is told of pairs done and pairs in all.
        folder: keeps one worker's vectors after every epoch, so that an interrupted training of the same pairs goes on.

    Raises:
        BadInput: there are no pairs.
    """
    how = how or Training()
    if not len(pairs):
        raise BadInput("there are no context pairs to train on: the programs have no statements in common")
    rank, ranks = (0, 1) if world is None else (world.rank, world.world_size)
    tables = Tables(size, how)
    # Workers may have no folder in common, and all of them must begin with the same epoch.
    epochs = Epochs(folder if ranks == 1 else None, tables, (how, pairs.tobytes()))
    exchange = TableExchange(tables, world) if world is not None and ranks > 1 else None
    draws = negative_table(pairs[:, 1], size)
    keep = _kept_shares(pairs, size, how.threshold)
    mine = np.ascontiguousarray(pairs[rank::ranks])
    # Ranks take the same number of steps, or one would wait for the others.
    per_epoch = len(pairs) // ranks if ranks > 1 else len(mine)
    total = how.epochs * per_epoch
    block_pairs = BLOCK if exchange is None else BLOCK // 16
    for epoch in range(epochs.done, how.epochs):
        done = epoch * per_epoch
        random = np.random.default_rng((how.seed, rank, epoch))
        order = random.permutation(len(mine))[:per_epoch]
        for start in range(0, per_epoch, block_pairs):
            block = mine[order[start : start + block_pairs]]
            rate = how.rate * max(0.01, 1 - done / total)
            done += len(block)
            if how.threshold:
                block = block[random.random(len(block)) < keep[block[:, 0]] * keep[block[:, 1]]]
            negatives = draws[random.integers(len(draws), size=(len(block), how.negatives))]
            fall = 0.99 * how.rate / total
            before = None if exchange is None else exchange.before(block, negatives)
            ascend(tables.v, tables.u, block, negatives, np.float32(rate), np.float32(fall))
            if exchange is not None and before is not None:
                exchange.after(before)
            progress(done, total)
        epochs.keep(epoch + 1)
    return tables.v.copy()


class Epochs:
    """The tables after the last whole epoch, in a folder.

    Args:
        made_from: what they depend on.
    """

    def __init__(self, folder: Path | None, tables: Tables, made_from: Sequence[object]) -> None:
        self.tables, self.done = tables, 0
        self.path: Path | None = None
        if folder is None:
            return
        digest = hashlib.sha256()
        for each in made_from:
            digest.update(each if isinstance(each, bytes) else repr(each).encode())
        self.path = folder / f"{digest.hexdigest()}.epochs"
        if self.path.is_file():
            try:
                content = tree.read_file(self.path)
                tables.both[:] = content["tables"].numpy()
                self.done = int(content["done"])
            except PayloadError:
                self.path.unlink(missing_ok=True)  # damaged: begun anew

    def keep(self, done: int) -> None:
        if self.path is not None:
            tree.write_file(self.path, {"done": done, "tables": torch.from_numpy(self.tables.both)})


class Tables:
    """The vectors of statements, v, and of contexts, u: two views of one array, `flat`."""

    def __init__(self, size: int, how: Training) -> None:
        self.both = np.zeros((2 * size, how.dim), dtype=np.float32)
        self.flat, self.v, self.u = self.both.reshape(-1), self.both[:size], self.both[size:]
        self.v[:] = np.random.default_rng(how.seed).uniform(-0.5 / how.dim, 0.5 / how.dim, (size, how.dim))


class TableExchange:
    """Lets workers agree on a block: the sum of what each changed, by a sparse all-reduce."""

    def __init__(self, tables: Tables, world: World) -> None:
        self.tables, self.world = tables, world

    def before(self, block: Integers, negatives: Integers) -> tuple[Integers, Floats]:
        """The rows that the block will change, and what they are."""
        rows = np.unique(np.concatenate([block[:, 0], len(self.tables.v) + np.append(block[:, 1], negatives)]))
        return rows, self.tables.both[rows]

    def after(self, before: tuple[Integers, Floats]) -> None:
        """Put the changes of all workers in the place of this one's."""
        rows, was = before
        dim = was.shape[1]
        places = rows.astype(np.int64)[:, None] * dim + np.arange(dim)
        own = SparseStream.of(places.reshape(-1), (self.tables.both[rows] - was).reshape(-1), len(self.tables.flat))
        added = sparse_all_reduce(own, self.world.transport)
        self.tables.both[rows] = was
        if added.indices is None:
            self.tables.flat += added.values
        else:
            self.tables.flat[added.indices] += added.values


def compile_kernel() -> None:
    """Compile the kernel ahead, for `laconic warm`."""
    train(np.array([[0, 1], [1, 0]], dtype=np.int32), 2, Training(dim=4, epochs=1))


def negative_table(contexts: Integers, size: int) -> Integers:
    """A table in which each statement has places in proportion to its count to the power 0.75."""
    weights = np.bincount(contexts, minlength=size) ** 0.75
    ends = np.cumsum(weights / weights.sum()) * _TABLE
    return np.searchsorted(ends, np.arange(_TABLE) + 0.5).astype(np.int32).clip(max=size - 1)


def _kept_shares(pairs: Integers, size: int, threshold: float) -> np.ndarray[Any, np.dtype[np.float64]]:
    frequency = np.bincount(pairs[:, 0], minlength=size) / len(pairs)
    return np.minimum(1.0, np.sqrt(threshold / np.maximum(frequency, 1e-12)))
