"""How to backpropagate through a long sequence in little memory: which states to keep, which to compute again.

Callers: `recurrent.py`. A sequence is cut into blocks. Going back through a block needs all that its steps computed
(`inside` units of memory); entering it anew needs only the state before it (`state` units). With m units for t blocks

    D(t, m) = t                                                if m ≥ inside·t: compute all, keep all, go back
    D(t, m) = min_y  y + D(t − y, m − state) + D(y, m)         else: run y blocks, keep the state there; the right part
                                                               first, then the left one in the same memory

counts the blocks that are computed; the minimising y is the plan.

Source: Gruslys, Munos, Danihelka, Lanctot, Graves, Memory-Efficient Backpropagation Through Time, NIPS 2016, §3.
Differs: the unit is a block of steps, so that every product has the same shape whatever the plan,
and gradients the same bits.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from laconic.errors import BadInput

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class Budget:
    """Memory for going back through `blocks`, in units: `total` for all, `inside` a block, `state` a kept state."""

    blocks: int
    total: int
    inside: int
    state: int

    @property
    def least(self) -> int:
        """What any plan needs: one block, and a state beside it where there is more than one."""
        return self.inside + (self.state if self.blocks > 1 else 0)


@cache
def costs(budget: Budget) -> tuple[Array, Array]:
    """D(t, m) and the minimising y, both for t = 0 … blocks and m = 0 … total; infinity where m is too little.

    >>> int(costs(Budget(blocks=10, total=1000, inside=5, state=1))[0][10, 1000])
    10
    """
    inside, state, total = budget.inside, budget.state, budget.total
    cost = np.full((budget.blocks + 1, total + 1), np.inf)
    cut = np.zeros((budget.blocks + 1, total + 1), np.int64)
    cost[0] = 0
    for t in range(1, budget.blocks + 1):
        if inside * t <= total:
            cost[t, inside * t :] = t
        for y in range(1, t):
            right = np.full(total + 1, np.inf)
            right[state:] = cost[t - y, : total + 1 - state]
            tried = y + right + cost[y]
            better = tried < cost[t]
            cost[t][better], cut[t][better] = tried[better], y
    return cost, cut


def recomputed(budget: Budget) -> float:
    """Blocks computed again, over all: 1.0 is one more forward pass.

    Raises:
        BadInput: the memory is below the least.
    """
    if budget.total < budget.least:
        raise BadInput(f"going back needs at least {budget.least} units of memory here, not {budget.total}")
    found = costs(budget)[0][budget.blocks, budget.total]
    return float(found) / budget.blocks - 1


def first_cuts(budget: Budget) -> list[int]:
    """Where the forward pass keeps a state: before these blocks."""
    _, cut = costs(budget)
    at, left, memory, found = 0, budget.blocks, budget.total, []
    while left and budget.inside * left > memory:
        y = int(cut[left, memory])
        at, left, memory = at + y, left - y, memory - budget.state
        found.append(at)
    return found


class Walk:
    """Goes back through all blocks by the plan.

    Args:
        budget: of memory.
        advance: (block, state) -> state after the block, keeping nothing.
        back: (first, last, state) computes blocks first … last − 1 from the state before them and goes back.
    """

    def __init__(
        self, budget: Budget, advance: Callable[[int, Any], Any], back: Callable[[int, int, Any], None]
    ) -> None:
        self.budget, self.advance, self.back = budget, advance, back
        _, self.cut = costs(budget)

    def go(self, kept: dict[int, Any], end: int) -> None:
        """Go back from block `end` on; `kept` are the states before block 0 and before all `first_cuts` but the last.

        From the last cut to the end the forward pass kept everything, and the caller went back already.
        """
        ends = [*sorted(kept), end]
        for i in reversed(range(len(kept))):
            self._part(ends[i], ends[i + 1], kept.pop(ends[i]), self.budget.total - i * self.budget.state)

    def _part(self, first: int, last: int, state: Any, memory: int) -> None:
        count = last - first
        if self.budget.inside * count <= memory:
            self.back(first, last, state)
            return
        y, ahead = int(self.cut[count, memory]), state
        for block in range(first, first + y):
            ahead = self.advance(block, ahead)
        self._part(first + y, last, ahead, memory - self.budget.state)
        self._part(first, first + y, state, memory)
