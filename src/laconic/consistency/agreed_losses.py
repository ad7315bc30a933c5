"""Agree on lost ranks through the job's store.

Callers: the modes that go on without a lost worker: servers and their clients, peers with bounded staleness, gossip.

A rank that is stopped or cut off for longer than the others wait looks dead to them, and they look dead to it. So no
rank goes on without another before the store lists that one as lost. A rank that gives up another adds it to the list,
unless it finds itself there first. Invariant: of two ranks that give each other up, one goes on, and the other raises
PeerLost about itself when it next looks.
"""

from __future__ import annotations

import json
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, TypeVar

from laconic.errors import PeerLost
from laconic.transports.liveness import LossLedger, LostPeer
from laconic.transports.world import World

LOGGER = logging.getLogger("laconic.consistency")
ANSWER_S = 5.0  # a living store answers in milliseconds
LOOK_S = 1.0  # how often someone who waits looks whether it was given up
_LOST, _NOBODY = "lost", "[]"
T = TypeVar("T")


def warn_of_loss(where: str, rank: int) -> None:
    """Log that a rank is lost, or warn if the application has set up no log."""
    text = f"{where}: goes on without rank {rank}, which is lost"
    LOGGER.warning(text)
    logger: logging.Logger | None = LOGGER
    while logger is not None:
        if any(not isinstance(handler, logging.NullHandler) for handler in logger.handlers):
            return
        logger = logger.parent
    warnings.warn(text, stacklevel=3)


class AgreedLosses(LossLedger):
    """The ranks of a mesh that were given up, as Liveness. Making it is collective; any thread may use it."""

    def __init__(self, world: World, mode: str) -> None:
        super().__init__(range(world.world_size))
        self.rank, self.engine = world.rank, world.engine
        self.where = f"[rank {world.rank}/{world.world_size}] {mode}"
        self._store = world.new_store(mode)
        self._looked_at = 0.0
        self._lock = threading.RLock()

    def give_up(self, rank: int) -> None:
        """Go on without `rank`.

        Raises:
            PeerLost: the others have given up this rank, or there is no store to agree through.
        """
        with self._lock:
            if rank in self.lost:
                return
            if self._store is None:
                if self.engine != "threads":
                    text = f"rank {rank} is lost, and engine '{self.engine}' has no store through which the others"
                    raise PeerLost(f"{self.where}: {text} could agree to go on", rank=self.rank, peer=rank)
                self._note([(rank, self.rank, time.time())])
                return
            store, known = self._store, self._read()
            while rank not in self.lost:
                words = [*json.loads(known), (rank, self.rank, time.time())]
                known = self._ask(store.compare_set, _LOST, known, json.dumps(words))
                self._note(json.loads(known))

    def look(self, every_s: float = LOOK_S) -> None:
        """Read which ranks the others gave up, at most every `every_s` seconds; PeerLost if it is this rank."""
        with self._lock:
            if self._store is not None and time.monotonic() - self._looked_at >= every_s:
                self._read()
                self._looked_at = time.monotonic()

    def commit(self, what: str) -> None:
        """Record in the store, for good, that `what` has happened."""
        if (store := self._store) is not None:
            self._ask(store.compare_set, what, "", "yes")

    def is_committed(self, what: str) -> bool:
        """Whether someone committed `what`; never where there is no store."""
        store = self._store
        return store is not None and bool(self._ask(store.check, [what]))

    def _read(self) -> bytes:
        store = self._store
        assert store is not None
        known = self._ask(store.compare_set, _LOST, "", _NOBODY)
        self._note(json.loads(known))
        return known

    def _note(self, words: Iterable[tuple[int, int, float]]) -> None:
        """Note (lost rank, by which rank, when)."""
        for rank, by, since in words:
            news = self.note(LostPeer(rank, by, "was given up", since))
            if news and rank != self.rank:
                warn_of_loss(self.where, rank)
        if self.rank in self.lost:
            text = "this rank was stopped or cut off for so long that the others gave it up and went on without it"
            raise PeerLost(f"{self.where}: {text}", rank=self.rank, peer=self.rank)

    def _ask(self, work: Callable[..., T], *args: Any) -> T:
        """Do `work` on the store within ANSWER_S: a store on a frozen host ignores its own time-out."""
        answer: Future[T] = Future()

        def task() -> None:
            try:
                answer.set_result(work(*args))
            except BaseException as error:
                answer.set_exception(error)

        threading.Thread(target=task, name="laconic-losses", daemon=True).start()
        try:
            return answer.result(ANSWER_S)
        except (RuntimeError, TimeoutError) as error:
            text = "the job's store, which says who was given up, does not answer"
            raise PeerLost(f"{self.where}: {text}", rank=self.rank) from error
