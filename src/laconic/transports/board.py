"""A notice board on the store: every rank's beat and what it is doing, so that a failure can be explained.

Callers: `torchdist.py`, whose engine tells neither who stopped nor who called something else. Liveness is kept outside
the collective: one small thread per transport beats on a connection of its own, and is joined by `close`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

BEAT_S = 0.25
# A living rank beats several times in this span even when ranks outnumber cores; a stopped one does not.
OBSERVE_S = 6 * BEAT_S
_SEPARATOR = "\x1f"


@dataclass(frozen=True)
class Notice:
    """What a rank last said: how often it has beaten, its call (sequence, signature), and why it left, if it did."""

    beats: int
    sequence: int
    signature: str
    left: str
    blames: int = -1


class Board:
    """This rank's notice, kept fresh, and everyone's notices, on demand."""

    def __init__(self, store: dist.Store, rank: int, world_size: int, doing: Callable[[], tuple[int, str]]) -> None:
        """
        Args:
            doing: called on the beating thread; returns (sequence, signature) of the present call.
        """
        clone = getattr(store, "clone", None)  # newer torch: a connection of our own
        self._store: dist.Store = clone() if clone is not None else store
        self._store.set_timeout(timedelta(seconds=2))
        self.rank = rank
        self.world_size = world_size
        self._doing = doing
        self._beats = 0
        self._left = ""
        self._blames = -1
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._beat, name=f"laconic-beat-{rank}", daemon=True)
        self.publish()
        self._thread.start()

    def _beat(self) -> None:
        while not self._stop.wait(BEAT_S):
            with contextlib.suppress(RuntimeError):  # a store that is gone is noticed by whoever reads it
                self.publish()

    def publish(self) -> None:
        """Write this rank's notice now."""
        with self._lock:
            self._beats += 1
            sequence, signature = self._doing()
            fields = (str(self._beats), str(sequence), signature, self._left, str(self._blames))
            self._store.set(f"notice/{self.rank}", _SEPARATOR.join(fields))

    def leave(self, why: str, blames: int = -1) -> None:
        """Say that this rank leaves, why, and which rank it holds responsible (−1: none)."""
        if not self._left:
            self._left, self._blames = why, blames
            with contextlib.suppress(RuntimeError):
                self.publish()

    def notices(self) -> dict[int, Notice]:
        """Everyone's last notice. Raises RuntimeError when the store cannot be reached."""
        found = {}
        with self._lock:
            for rank in range(self.world_size):
                key = f"notice/{rank}"
                if self._store.check([key]):
                    beats, sequence, signature, left, blames = self._store.get(key).decode().split(_SEPARATOR)
                    found[rank] = Notice(int(beats), int(sequence), signature, left, int(blames))
        return found

    def silent(self, before: dict[int, Notice], since: float) -> set[int]:
        """Ranks that have neither beaten nor left since `before` was taken at monotonic time `since`.

        Waits until OBSERVE_S have passed since then.
        """
        time.sleep(max(0.0, since + OBSERVE_S - time.monotonic()))
        after = self.notices()

        def quiet(rank: int) -> bool:
            if rank not in after:
                return True
            return not after[rank].left and rank in before and after[rank].beats <= before[rank].beats

        return {rank for rank in range(self.world_size) if rank != self.rank and quiet(rank)}

    def close(self) -> None:
        """Stop beating; joins the thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=5)
