"""In what order samples are used: a pure function of (seed, epoch), divided by step and then by rank.

Callers: `workloads`. Invariants: every sample of an epoch is used exactly once, and the samples of a step are the
same set whatever the number of workers, so that a distributed run can be compared with a sequential one and resumed at
any (epoch, step) without replaying what came before.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput


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
        permutation = np.random.default_rng([self.seed, self.epoch]).permutation(self.samples)
        object.__setattr__(self, "_permutation", torch.from_numpy(permutation))

    @property
    def steps(self) -> int:
        """Steps of the epoch, the same for every rank."""
        return steps(self.samples, self.batch)

    def size(self, step: int) -> int:
        """Samples of a step over all ranks."""
        first, last = _part(self.samples, step, self.steps)
        return last - first

    def indices(self, step: int, rank: int = 0, world_size: int = 1) -> Tensor:
        """The sample numbers rank `rank` of `world_size` uses at `step`; empty when ranks outnumber samples."""
        if not 0 <= step < self.steps:
            raise BadInput(f"an epoch of {self.samples} samples in batches of {self.batch} has steps 0 to "
                           f"{self.steps - 1}, got {step}")
        if not 0 <= rank < world_size:
            raise BadInput(f"rank {rank} is not one of {world_size} ranks")
        first, last = _part(self.samples, step, self.steps)
        start, stop = _part(last - first, rank, world_size)
        permutation: Tensor = self._permutation  # type: ignore[attr-defined]
        return permutation[first + start : first + stop]


def steps(samples: int, batch: int) -> int:
    """How many steps use every sample once in batches of at most `batch`."""
    return -(-samples // batch)


def _part(total: int, part: int, parts: int) -> tuple[int, int]:
    """Where part `part` of `parts` nearly equal ones starts and stops in `total` places."""
    return total * part // parts, total * (part + 1) // parts
