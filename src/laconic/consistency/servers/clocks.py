"""The clock table of stale-synchronous training: steps taken by each worker, and who may go on. No communication.

Callers: `server.py` (the centralised mode), `stale.py` (the decentralised one) and the simulation in the tests.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from laconic.errors import StalenessError


class Clocks:
    """How many steps each worker has taken, and the bound on how far they may be apart.

    A worker at clock c (c steps taken) may compute the next only when the slowest is at s ≥ c − bound. Invariant: no
    clock ever exceeds the slowest by more than bound + 1, and none computes from weights that lack an update older than
    `bound` steps.

    >>> clocks = Clocks([0, 1], bound=1)
    >>> clocks.tick(0, 1), clocks.may_begin(0)
    (None, True)
    >>> clocks.tick(0, 2), clocks.may_begin(0)
    (None, False)
    """

    def __init__(self, workers: Iterable[int], bound: int | None) -> None:
        self.bound = bound
        self.clocks = dict.fromkeys(workers, 0)
        self._away: set[int] = set()

    def hear(self, worker: int, clock: int) -> None:
        """Note that `worker` has taken `clock` steps; the messages that allowed it may not have arrived yet."""
        before = self.clocks.get(worker, clock)
        if clock < before:
            raise StalenessError(f"worker {worker} was at clock {before} and now says {clock}")
        self.clocks[worker] = clock

    def tick(self, worker: int, clock: int) -> None:
        """Set `worker` to `clock` steps; StalenessError if one was not allowed, or the clock goes back."""
        if self.bound is not None and clock - 1 - self.slowest > self.bound:
            raise StalenessError(
                f"worker {worker} computed step {clock} while the slowest has taken {self.slowest}: the bound is "
                f"{self.bound}"
            )
        self.hear(worker, clock)

    @property
    def slowest(self) -> int:
        """The clock of the slowest active worker; of the fastest if none is active."""
        present = [clock for worker, clock in self.clocks.items() if worker not in self._away]
        return min(present) if present else max(self.clocks.values(), default=0)

    def may_begin(self, worker: int) -> bool:
        """Whether the worker may compute its next step."""
        return self.bound is None or self.clocks.get(worker, 0) - self.slowest <= self.bound

    def leave(self, worker: int) -> None:
        """Remove a worker for good: nobody waits for it any more."""
        self.clocks.pop(worker, None)
        self._away.discard(worker)

    def pause(self, worker: int) -> None:
        """Pause a worker: nobody waits for it until `resume`."""
        self._away.add(worker)

    def is_away(self, worker: int) -> bool:
        """Whether the worker is paused."""
        return worker in self._away

    def state_dict(self) -> dict[str, Any]:
        return {"clocks": dict(self.clocks), "away": sorted(self._away)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.clocks, self._away = dict(state["clocks"]), set(state["away"])

    def resume(self) -> None:
        """Resume all workers at the fastest one's clock."""
        self._away.clear()
        if self.clocks:
            self.clocks = dict.fromkeys(self.clocks, max(self.clocks.values()))


def check_read(who: str, clock: int, slowest: int, bound: int) -> None:
    """Check the bound again at the reader: StalenessError if slowest < clock − bound.

    Args:
        who: the worker, as in "[rank 1/4]"; it has taken `clock` steps.
        slowest: steps that its weights hold of every worker.
    """
    if clock - slowest > bound:
        raise StalenessError(f"{who} stale: at clock {clock}, with weights of clock {slowest}, the bound is {bound}")
