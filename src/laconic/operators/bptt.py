"""Backpropagate through a long sequence in little memory: which states to keep, which to recompute.

Callers: `recurrent.py`. A sequence is cut into blocks. Going back through a block needs all that its steps computed
(`inside` units of memory); entering it anew needs only the state before it (`state` units). With m units for t blocks

    D(t, m) = t                                                if m ≥ inside·t: compute all, keep all, go back
    D(t, m) = min_y  y + D(t − y, m − state) + D(y, m)         else: run y blocks, keep the state there; the right part
                                                               first, then the left one in the same memory

counts the blocks that are computed; the minimising y is the plan. Only m = total − k·state is ever met, for the k
states kept before: the table is of t and k, however large a block is.

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

    def fits(self, blocks: int, kept: int) -> bool:
        """Whether so many blocks can be kept whole beside so many states."""
        return self.inside * blocks <= self.total - kept * self.state


@cache
def costs(budget: Budget) -> tuple[Array, Array]:
    """D(t, total − k·state) and the minimising y, both for t = 1 … blocks and k = 0 … blocks − t; infinity where that
    is too little.

    >>> int(costs(Budget(blocks=10, total=1000, inside=5, state=1))[0][10, 0])
    10
    """
    blocks = budget.blocks
    cost = np.full((blocks + 1, blocks + 1), np.inf)
    cut = np.zeros((blocks + 1, blocks + 1), np.int32)
    left = budget.total - budget.state * np.arange(blocks + 1)
    for t in range(1, blocks + 1):
        kept = blocks - t + 1
        if t > 1:
            y = np.arange(1, t)[:, None]
            tried = y + cost[t - 1 : 0 : -1, 1 : kept + 1] + cost[1:t, :kept]
            cut[t, :kept], cost[t, :kept] = tried.argmin(0) + 1, tried.min(0)
        cost[t, :kept][budget.inside * t <= left[:kept]] = t
    return cost, cut


def first_cuts(budget: Budget) -> list[int]:
    """Where the forward pass keeps a state: before these blocks."""
    _, cut = costs(budget)
    found = [0]
    while not budget.fits(left := budget.blocks - found[-1], kept := len(found) - 1):
        found.append(found[-1] + int(cut[left, kept]))
    return found[1:]


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
            self._part(ends[i], ends[i + 1], kept.pop(ends[i]), i)

    def _part(self, first: int, last: int, state: Any, kept: int) -> None:
        """Go back through some blocks, `kept` states being kept before them."""
        count = last - first
        if self.budget.fits(count, kept):
            self.back(first, last, state)
            return
        y, ahead = int(self.cut[count, kept]), state
        for block in range(first, first + y):
            ahead = self.advance(block, ahead)
        self._part(first + y, last, ahead, kept + 1)
        self._part(first, first + y, state, kept)
