"""The order of samples: a pure function of (seed, epoch), divided by step and then by rank.

Callers: `Task`, which trains fixed workers; `Cursor` of checkpoints; elastic jobs, whose `SampleLedger` also knows
workers that come, go and are dropped. The same seed gives the same order everywhere and, as long as no worker is
dropped, the same division.

Invariants: every sample of an epoch is used exactly once, and the samples of a step are the same set whatever the
number of workers, so that a distributed run can be compared with a sequential one and resumed at any (epoch, step)
without replaying what came before.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Collection
from dataclasses import dataclass
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput


def permutation(samples: int, seed: int, epoch: int) -> Tensor:
    """The order of all samples of an epoch, as int64."""
    return torch.from_numpy(np.random.default_rng([seed, epoch]).permutation(samples).astype(np.int64, copy=False))


def steps(samples: int, batch: int) -> int:
    """How many steps use every sample once in batches of at most `batch`."""
    return -(-samples // batch)


def part(total: int, index: int, parts: int) -> tuple[int, int]:
    """Where part `index` of `parts` nearly equal ones starts and stops in `total` places.

    >>> [part(10, index, 3) for index in range(3)]
    [(0, 3), (3, 6), (6, 10)]
    """
    return total * index // parts, total * (index + 1) // parts


Parts = int | tuple[int, ...]  # how many equal shares, or the weight of each share


def weighted_part(total: int, index: int, parts: Parts) -> tuple[int, int]:
    """As `part`; with weights, shares are such that max(size/weight), the time of the slowest, is least.

    A share is first rounded down; each sample that is left goes to who would have made it first.

    >>> [weighted_part(10, index, (4, 1)) for index in range(2)]
    [(0, 8), (8, 10)]
    """
    if isinstance(parts, int):
        return part(total, index, parts)
    return _ends(total, parts)[index : index + 2]  # type: ignore[return-value]


@functools.lru_cache(maxsize=64)
def _ends(total: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """Zero, and where each weighted share ends."""
    sizes = [total * weight // sum(weights) for weight in weights]
    for _ in range(total - sum(sizes)):
        first = min(range(len(sizes)), key=lambda member: Fraction(sizes[member] + 1, weights[member]))
        sizes[first] += 1
    return tuple(itertools.accumulate(sizes, initial=0))


def count(parts: Parts) -> int:
    """The number of shares."""
    return parts if isinstance(parts, int) else len(parts)


@dataclass(frozen=True)
class EpochOrder:
    """The order of one epoch.

    Steps = ⌈samples / batch⌉; step s takes places ⌊s·samples/steps⌋ to ⌊(s+1)·samples/steps⌋ of the permutation, so
    that step sizes differ by at most one and no small batch is left at the end. Rank r of P takes the r-th of P such
    parts of the step.

    >>> order = EpochOrder(samples=10, batch=4, seed=7, epoch=0)
    >>> order.steps, [order.size(step) for step in range(3)]
    (3, [3, 3, 4])
    >>> two = torch.cat([order.indices(2, rank, world_size=2) for rank in range(2)])
    >>> torch.equal(two, order.indices(2))
    True

    Args:
        samples: samples in the split.
        batch: the most samples of a step, over all ranks.
        seed: of the run.
        epoch: from 0.
    """

    samples: int
    batch: int
    seed: int
    epoch: int

    def __post_init__(self) -> None:
        if self.samples < 1 or self.batch < 1 or self.epoch < 0 or self.seed < 0:
            raise BadInput(
                "an epoch needs samples ≥ 1, batch ≥ 1, seed ≥ 0 and epoch ≥ 0, got "
                f"{self.samples}, {self.batch}, {self.seed} and {self.epoch}"
            )
        object.__setattr__(self, "_permutation", permutation(self.samples, self.seed, self.epoch))

    @property
    def steps(self) -> int:
        """Steps of the epoch, the same for every rank."""
        return steps(self.samples, self.batch)

    def size(self, step: int) -> int:
        """Samples of a step over all ranks."""
        first, last = part(self.samples, step, self.steps)
        return last - first

    def indices(self, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
        """The sample numbers rank `rank` of `world_size` uses at `step`; empty when ranks outnumber samples."""
        if not 0 <= step < self.steps:
            raise BadInput(
                f"an epoch of {self.samples} samples in batches of {self.batch} has steps 0 to "
                f"{self.steps - 1}, got {step}"
            )
        if not 0 <= rank < world_size:
            raise BadInput(f"rank {rank} is not one of {world_size} ranks")
        first, last = part(self.samples, step, self.steps)
        start, stop = part(last - first, rank, world_size)
        order: Tensor = self._permutation  # type: ignore[attr-defined]
        return order[first + start : first + stop]


class SampleLedger:
    """The samples of an epoch that are still to be used: every worker keeps one, and they never differ.

    A step's samples count only when the step, or the block it is in, commits. Whoever takes part, and however often
    that changes, every sample of an epoch is committed exactly once before the next epoch begins. The division is that
    of `EpochOrder` until a worker is dropped from its step; from then on, with r samples left, the next step takes
    ⌊r / ⌈r / batch⌉⌋ of them, so that steps still differ little. State is a few numbers: everything before `cursor` is
    committed, except the places in `left`, whose worker was dropped.

    >>> ledger = SampleLedger(samples=10, batch=4, seed=7)
    >>> [len(share) for share in ledger.shares(2)]
    [1, 2]
    >>> ledger.commit(2, included=[0, 1])
    >>> ledger.remaining
    7

    Args:
        samples: samples of an epoch, numbered from 0.
        batch: the most samples of a step, over all workers.
        seed: of the run.

    Attributes:
        epoch: from 0.
    """

    def __init__(self, samples: int, batch: int, seed: int = 0) -> None:
        if samples < 1 or batch < 1 or seed < 0:
            text = f"{samples}, {batch} and {seed}"
            raise BadInput(f"a ledger needs dataset_size ≥ 1, batch ≥ 1 and seed ≥ 0, got {text}")
        self.samples, self.batch, self.seed = samples, batch, seed
        self._begin(0)

    def _begin(self, epoch: int) -> None:
        self.epoch, self._cursor = epoch, 0
        self._left: list[int] = []
        self._order = permutation(self.samples, self.seed, epoch)

    @property
    def remaining(self) -> int:
        """Samples of this epoch that no committed step has used."""
        return self.samples - self._cursor + len(self._left)

    def shares(self, parts: Parts) -> list[Tensor]:
        """The sample numbers of the next step, divided among `parts` members; empty ones when these outnumber them."""
        return self.block(parts, 1)[0]

    def block(self, parts: Parts, steps: int) -> list[list[Tensor]]:
        """The shares of each of the next `steps` steps, or of fewer where the epoch ends before.

        >>> [[len(share) for share in shares] for shares in SampleLedger(10, 4).block(2, 8)]
        [[1, 2], [1, 2], [2, 2]]
        """
        return [[self._order[places] for places in divided] for divided in self._places(parts, steps)]

    def commit(self, parts: Parts, included: Collection[int], steps: int = 1) -> None:
        """The next step, or block, divided among `parts` members, is committed with the shares of the `included`."""
        block = self._places(parts, steps)
        taken = sum(len(share) for divided in block for share in divided)
        first_new = min(taken, len(self._left))
        dropped = [
            divided[index].tolist() for divided in block for index in range(count(parts)) if index not in included
        ]
        self._left = sorted(itertools.chain(*dropped, self._left[first_new:]))
        self._cursor += taken - first_new
        if self.remaining == 0:
            self._begin(self.epoch + 1)

    def _places(self, parts: Parts, most: int) -> list[list[Tensor]]:
        """Places in the permutation, by step and member: first those that are left, then new ones."""
        sizes = self._sizes(most)
        again = torch.tensor(self._left[: sum(sizes)], dtype=torch.int64)
        new = torch.arange(self._cursor, self._cursor + sum(sizes) - len(again))
        block = torch.split(torch.cat([again, new]), sizes)
        members = range(count(parts))
        return [[step[slice(*weighted_part(len(step), index, parts))] for index in members] for step in block]

    def _sizes(self, most: int) -> list[int]:
        """How many samples each of the next `most` steps takes, or of fewer where the epoch ends before."""
        all_steps, remaining = steps(self.samples, self.batch), self.remaining
        next_step = all_steps - steps(remaining, self.batch)
        if not self._left and part(self.samples, next_step, all_steps)[0] == self._cursor:  # nobody was dropped
            edges = [part(self.samples, step, all_steps) for step in range(next_step, min(next_step + most, all_steps))]
            return [stop - start for start, stop in edges]
        sizes: list[int] = []
        while remaining and len(sizes) < most:
            sizes.append(remaining // steps(remaining, self.batch))
            remaining -= sizes[-1]
        return sizes

    def state(self) -> dict[str, Any]:
        """Plain values from which `load` goes on."""
        return {"epoch": self.epoch, "cursor": self._cursor, "left": list(self._left)}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of `state`.

        Raises:
            BadInput: it is no place in this data.
        """
        left: Any = state.get("left")
        numbers: list[Any] = [state.get("epoch"), state.get("cursor"), *left] if isinstance(left, list) else [None]
        if not all(type(number) is int and number >= 0 for number in numbers) or max(numbers[1:]) > self.samples:
            raise BadInput(f"the place in the data is not one of {self.samples} samples: {str(state)[:200]}")
        self._begin(numbers[0])
        self._cursor, self._left = numbers[1], numbers[2:]
