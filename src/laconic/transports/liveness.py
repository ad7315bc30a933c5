"""Present and lost peers, since when and reported by whom: one protocol for engines, modes and elastic jobs.

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
    """A peer that no longer takes part.

    Attributes:
        peer: its rank, or a member's number.
        by: who reported it: the peer itself if it left, else the one that missed it.
        why: the rest of a sentence that begins with the peer.
        since: when it became known, in seconds since 1970.
    """

    peer: int
    by: int
    why: str
    since: float = field(default_factory=time.time)

    @property
    def has_left(self) -> bool:
        """Whether it announced its own departure."""
        return self.by == self.peer


class Liveness(Protocol):
    """What one rank or member knows of all peers; a lost peer never returns under its number."""

    @property
    def here(self) -> list[int]:
        """The peers known to take part, itself included."""

    @property
    def lost(self) -> Mapping[int, LostPeer]:
        """The lost peers, in the order in which their loss became known."""


class LossLedger:
    """Liveness of `everyone` from noted losses: all others are here. The first note about a peer stands."""

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
        """Note a loss; return whether it is new.

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
