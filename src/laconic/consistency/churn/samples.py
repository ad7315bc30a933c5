"""Which samples of an epoch have been used: a pure, seeded ledger that every worker keeps and that never differs.

Callers: `job.py`. Invariants: a step's samples count only when the step commits; whoever takes part, and however often
that changes, every sample of an epoch is committed exactly once before the next epoch begins; without dropped workers
the samples of a step are the same set whatever the number of workers.
"""

from __future__ import annotations

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
        return [self._order[torch.tensor(places, dtype=torch.int64)] for places in self._places(parts)]

    def commit(self, parts: int, included: Collection[int]) -> None:
        """The next step, divided among `parts` members, is committed with the shares of those in `included`."""
        places = self._places(parts)
        taken = sum(map(len, places))
        first_new = min(taken, len(self._left))
        dropped = [place for part, share in enumerate(places) if part not in included for place in share]
        self._left = sorted(dropped + self._left[first_new:])
        self._cursor += taken - first_new
        if self.remaining == 0:
            self._begin(self.epoch + 1)

    def _places(self, parts: int) -> list[list[int]]:
        steps = -(-self.remaining // self.batch)
        size = self.remaining // steps
        again = self._left[:size]
        places = again + list(range(self._cursor, self._cursor + size - len(again)))
        return [places[size * part // parts : size * (part + 1) // parts] for part in range(parts)]

    def state(self) -> dict[str, Any]:
        """Plain values from which `load` goes on."""
        return {"epoch": self.epoch, "cursor": self._cursor, "left": list(self._left)}

    def load(self, state: dict[str, Any]) -> None:
        """The reverse of `state`."""
        self._begin(int(state["epoch"]))
        self._cursor, self._left = int(state["cursor"]), [int(place) for place in state["left"]]
