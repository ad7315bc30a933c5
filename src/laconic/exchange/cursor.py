"""Where a worker is in its data: a position in the order of samples that `workloads/order.py` gives a seed.

Callers: users, with `Checkpoints`. Invariant: what comes after a state was saved is what comes after it was loaded.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor

from laconic.errors import BadInput
from laconic.transports.world import World, current
from laconic.workloads.order import part, permutation


class Cursor:
    """This worker's row numbers of every batch, endlessly, in the order that the seed and the epoch decide.

    A batch is `batch` samples over all workers, of which each takes a part; a last batch with fewer is left out, and
    the next epoch begins. Where `batch` divides `numel` these are the batches of a workload and of an elastic job.

    Args:
        numel: samples of the dataset.
        batch: samples of a step over all workers, at least one for each.
        seed: decides the order.
        world: the workers; the default world when None.

    >>> cursor = Cursor(6, batch=2)
    >>> _ = next(cursor)
    >>> kept = cursor.state_dict()
    >>> kept
    {'epoch': 0, 'position': 2, 'numel': 6, 'seed': 0}
    >>> coming = next(cursor)
    >>> cursor.load_state_dict(kept)
    >>> next(cursor).equal(coming)
    True
    """

    def __init__(self, numel: int, *, batch: int, seed: int = 0, world: World | None = None) -> None:
        world = world or current()
        self.rank, self.world_size = world.rank, world.world_size
        if not self.world_size <= batch <= numel:
            text = f"at least one sample for each of {self.world_size} workers and at most {numel}, the data"
            raise BadInput(f"batch is the samples of a step over all workers: {text}, got {batch}")
        if seed < 0:
            raise BadInput(f"a seed is a whole number ≥ 0, got {seed}")
        self.numel, self.batch, self.seed = numel, batch, seed
        self.epoch = self.position = 0
        self._order: tuple[int, Tensor] | None = None

    def __iter__(self) -> Iterator[Tensor]:
        return self

    def __next__(self) -> Tensor:
        if self.position + self.batch > self.numel:
            self.epoch, self.position = self.epoch + 1, 0
        if self._order is None or self._order[0] != self.epoch:
            self._order = self.epoch, permutation(self.numel, self.seed, self.epoch)
        rows = self._order[1][self.position : self.position + self.batch]
        self.position += self.batch
        return rows[slice(*part(self.batch, self.rank, self.world_size))]

    def state_dict(self) -> dict[str, int]:
        """The place, as plain numbers."""
        return {"epoch": self.epoch, "position": self.position, "numel": self.numel, "seed": self.seed}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a saved place.

        Raises:
            BadInput: it is a place in other data, or in another order.
        """
        if (state["numel"], state["seed"]) != (self.numel, self.seed):
            theirs = f"{state['numel']} samples by seed {state['seed']}"
            raise BadInput(f"the cursor was saved in {theirs}; this one reads {self.numel} by seed {self.seed}")
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
