"""Which samples of an epoch have been used: a pure, seeded ledger that every worker keeps and that never differs.

Callers: `work.py` and `blocks.py`. Invariants: a step's samples count only when the step, or the block it is in,
commits; whoever takes part, and however often that changes, every sample of an epoch is committed exactly once before
the next epoch begins; without dropped workers the samples of a step are the same set whatever the number of workers.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from laconic.errors import BadInput


class SampleLedger:
    """The samples that are still to be used, in the order of a permutation by (seed, epoch).

    With r samples left, the next step takes ⌊r / ⌈r / batch⌉⌋ of them: steps of an epoch differ by at most one sample.
    Member i of `parts` gets the i-th of as many nearly equal parts. State is a few numbers: everything before `cursor`
    is committed, except the places in `left`, whose worker was dropped from its step.

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
        order = np.random.default_rng([self.seed, epoch]).permutation(self.samples)
        self._order = torch.from_numpy(order.astype(np.int64))

    @property
    def remaining(self) -> int:
        """Samples of this epoch that no committed step has used."""
        return self.samples - self._cursor + len(self._left)

    def shares(self, parts: int) -> list[Tensor]:
        """The sample numbers of the next step, divided among `parts` members; empty ones when these outnumber them."""
        return self.block(parts, 1)[0]

    def block(self, parts: int, steps: int) -> list[list[Tensor]]:
        """The shares of each of the next `steps` steps, or of fewer where the epoch ends before.

        >>> [[len(share) for share in shares] for shares in SampleLedger(10, 4).block(2, 8)]
        [[1, 2], [1, 2], [2, 2]]
        """
        return [[self._order[places] for places in divided] for divided in self._places(parts, steps)]

    def commit(self, parts: int, included: Collection[int], steps: int = 1) -> None:
        """The next step, or block, divided among `parts` members, is committed with the shares of the `included`."""
        block = self._places(parts, steps)
        taken = sum(len(share) for divided in block for share in divided)
        first_new = min(taken, len(self._left))
        dropped = [divided[part].tolist() for divided in block for part in range(parts) if part not in included]
        self._left = sorted(itertools.chain(*dropped, self._left[first_new:]))
        self._cursor += taken - first_new
        if self.remaining == 0:
            self._begin(self.epoch + 1)

    def _places(self, parts: int, steps: int) -> list[list[Tensor]]:
        """Places in the permutation, by step and member: first those that are left, then new ones."""
        sizes, remaining = list[int](), self.remaining
        while remaining and len(sizes) < steps:
            sizes.append(remaining // -(-remaining // self.batch))
            remaining -= sizes[-1]
        again = torch.tensor(self._left[: sum(sizes)], dtype=torch.int64)
        new = torch.arange(self._cursor, self._cursor + sum(sizes) - len(again))
        block = torch.split(torch.cat([again, new]), sizes)
        return [
            [step[len(step) * part // parts : len(step) * (part + 1) // parts] for part in range(parts)]
            for step in block
        ]

    def state(self) -> dict[str, Any]:
        """Plain values from which `load` goes on."""
        return {"epoch": self.epoch, "cursor": self._cursor, "left": list(self._left)}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self._begin(int(state["epoch"]))
        self._cursor, self._left = int(state["cursor"]), [int(place) for place in state["left"]]
