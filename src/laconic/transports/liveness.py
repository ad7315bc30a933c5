"""Who takes part and who is lost, since when and by whose word: one protocol for engines, modes and elastic jobs.

Implemented over the notice board on a store (`board.py`), notices between MPI ranks (`mpi_notices.py`), a word of the
job's store (`consistency/agreed_losses.py`) and the heartbeats of an elastic view (`consistency/elastic/watch.py`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True)
class LostPeer:
    """A peer that takes part no more.

    Attributes:
        peer: its rank, or a member's number.
        by: who said so: the peer itself where it has left, else who missed it.
        why: the rest of a sentence that begins with the peer.
        since: when that became known, in seconds since 1970.
    """

    peer: int
    by: int
    why: str
    since: float = field(default_factory=time.time)

    @property
    def has_left(self) -> bool:
        """Whether it went by its own word."""
        return self.by == self.peer


class Liveness(Protocol):
    """What one rank or member knows of all; who is lost never comes back under its number."""

    @property
    def here(self) -> list[int]:
        """Who takes part, as far as known, itself included."""

    @property
    def lost(self) -> Mapping[int, LostPeer]:
        """Who is lost, in the order in which that became known."""


class LossLedger:
    """Liveness by what is noted of `everyone`: who was not noted as lost is here. The first word about one stands."""

    def __init__(self, everyone: Iterable[int]) -> None:
        self._everyone = list(everyone)
        self._lost: dict[int, LostPeer] = {}

    @property
    def here(self) -> list[int]:
        return [peer for peer in self._everyone if peer not in self._lost]

    @property
    def lost(self) -> Mapping[int, LostPeer]:
        return self._lost

    def note(self, loss: LostPeer) -> bool:
        """Write a loss down; whether that is news.

        >>> ledger = LossLedger([4, 5, 6])
        >>> ledger.note(LostPeer(5, by=4, why="was silent")), ledger.note(LostPeer(5, by=5, why="has left"))
        (True, False)
        >>> ledger.here, ledger.lost[5].by
        ([4, 6], 4)
        """
        if loss.peer in self._lost:
            return False
        self._lost = {**self._lost, loss.peer: loss}  # a new one: other threads may be reading
        return True
