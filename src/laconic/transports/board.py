"""A notice board on the store: every rank's beat and what it is doing, so that a failure can be explained.

Callers: `torchdist.py`, whose engine does not report which rank stopped or made a different call. Liveness is kept
outside the collective: one small thread per transport beats on its own connection. Only that thread uses the store,
because a store on a frozen host never answers, whatever its time-out; others ask the thread and wait a little.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar

import torch.distributed as dist

from laconic.transports.liveness import LossLedger, LostPeer

BEAT_S = 0.25
# A living rank beats several times in this span even when ranks outnumber cores; a stopped one does not.
OBSERVE_S = 6 * BEAT_S
ANSWER_S = 3.0  # a living store answers in milliseconds
ANSWERED_BEATS = 4
T = TypeVar("T")
_log = logging.getLogger("laconic.transports")


class StoreGone(RuntimeError):
    """The store does not answer: its host has died, stopped or been cut off."""


@dataclass(frozen=True)
class Notice:
    """A rank's last notice: its count of beats, its call (sequence, signature), and why it left, if it did."""

    beats: int
    sequence: int
    signature: str
    left: str
    blames: int = -1


class Board(LossLedger):
    """Keeps this rank's notice fresh, and reads all notices on demand; Liveness from the notices read so far.

    A rank is lost if it has left, was blamed by a rank that left, or was silent for too long.

    Args:
        rank: this rank's job-wide number, as all here: a rank that left one part may blame a rank of another.
        ranks: everyone who has a notice here.
        doing: called on the beating thread; returns (sequence, signature) of the present call.
    """

    def __init__(
        self, store: dist.Store, rank: int, ranks: Sequence[int], doing: Callable[[], tuple[int, str]]
    ) -> None:
        super().__init__(ranks)
        clone = getattr(store, "clone", None)  # newer torch: a connection of our own
        self._store: dist.Store = clone() if clone is not None else store
        if clone is not None:
            self._store.set_timeout(timedelta(seconds=2))
        self.rank = rank
        self.ranks = ranks
        self._doing = doing
        self._beats = 0
        self._busy_since: float | None = None  # the store has owed the thread an answer from then on
        self._gone = False
        self._left = ""
        self._blames = -1
        self._tasks: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._beat, name=f"laconic-beat-{rank}", daemon=True)
        self._thread.start()
        with contextlib.suppress(StoreGone):
            self.publish()

    def _beat(self) -> None:
        """Beat, and serve requests in between; the only code that uses the store."""
        while True:
            try:
                task = self._tasks.get(timeout=BEAT_S)
            except queue.Empty:
                if self._gone:
                    continue
                task = self._write
            if task is None:
                return
            self._busy_since = time.monotonic()
            try:
                task()
            except dist.DistNetworkError:  # for good: a store's client does not connect again, and torch logs each try
                self._gone = True
                _log.warning("rank %d: the store is gone", self.rank)
            except RuntimeError:
                pass  # a store that is slow is noticed by whoever asks
            self._busy_since = None

    def _ask(self, work: Callable[[], T]) -> T:
        """Let the beating thread do `work`; StoreGone when it fails or takes too long."""
        if self._gone:
            raise StoreGone("the connection to the store has ended")
        answer: Future[T] = Future()

        def task() -> None:
            try:
                answer.set_result(work())
            except BaseException as error:
                answer.set_exception(error)
                raise

        self._tasks.put(task)
        try:
            return answer.result(timeout=self._patience_s())
        except (RuntimeError, TimeoutError) as error:
            raise StoreGone(str(error) or "the store does not answer") from error

    def _patience_s(self) -> float:
        """How long to wait for the thread: less, when the store has kept it waiting already."""
        since = self._busy_since
        return ANSWER_S if since is None else max(0.0, since + ANSWER_S - time.monotonic())

    def _write(self) -> None:
        self._beats += 1
        self._store.set(f"notice/{self.rank}", json.dumps([self._beats, *self._doing(), self._left, self._blames]))
        if self._beats % ANSWERED_BEATS == 0:  # writing waits for no answer; a store that is cut off shows in this
            self._store.check([f"notice/{self.rank}"])

    def _read(self) -> dict[int, Notice]:
        keys = {rank: f"notice/{rank}" for rank in self.ranks}
        return {r: Notice(*json.loads(self._store.get(key))) for r, key in keys.items() if self._store.check([key])}

    def publish(self) -> None:
        """Write this rank's notice now. Raises StoreGone."""
        self._ask(self._write)

    def notices(self) -> dict[int, Notice]:
        """Read all ranks' last notices; note ranks that left, and those they blame, as lost. Raises StoreGone."""
        found = self._ask(self._read)
        gone = {rank: f"has left: {notice.left}" for rank, notice in found.items() if notice.left}
        for rank in gone:
            if (blamed := found[rank].blames) not in (-1, self.rank):
                self.note(LostPeer(blamed, rank, gone.get(blamed, "was lost, as another rank found")))
        for rank, why in gone.items():
            self.note(LostPeer(rank, rank, why))
        return found

    def leave(self, why: str, blames: int = -1) -> None:
        """Announce that this rank leaves, why, and which rank it blames (−1: none)."""
        if not self._left:
            self._left, self._blames = why, blames
            with contextlib.suppress(StoreGone):
                self.publish()

    def silent(self, before: dict[int, Notice], since: float) -> set[int]:
        """Ranks that have neither beaten nor left since `before` was taken at monotonic time `since`.

        Waits until OBSERVE_S have passed since then; when several seem silent, looks again, for a busy machine may have
        kept a living one from beating.
        """
        quiet = self._quiet_since(before, since)
        if len(quiet) > 1:
            quiet &= self._quiet_since(self.notices(), time.monotonic())
        for rank in sorted(quiet):
            self.note(LostPeer(rank, self.rank, "was lost: it has died, stopped or been cut off"))
        return quiet

    def _quiet_since(self, before: dict[int, Notice], since: float) -> set[int]:
        time.sleep(max(0.0, since + OBSERVE_S - time.monotonic()))
        after = self.notices()

        def is_quiet(rank: int) -> bool:
            if rank not in after:
                return True
            return not after[rank].left and rank in before and after[rank].beats <= before[rank].beats

        return {rank for rank in self.ranks if rank != self.rank and is_quiet(rank)}

    def close(self) -> None:
        """Stop beating; joins the thread, unless a frozen store holds it."""
        self._tasks.put(None)
        self._thread.join(timeout=self._patience_s())
