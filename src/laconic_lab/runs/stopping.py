"""Let a run's ranks stop or write a checkpoint at the same step, without a message.

Callers: the trainer on every rank, and the command, which asks. Before each step s rank 0 looks for a request and
writes into the run's folder what all ranks do before step s + `lead`. No rank can reach that step before the order is
written, because it first needs what rank 0 sends in step s. Modes whose ranks wait for each other less often stop at
the end of an epoch, where all ranks meet. All ranks must share the folder, as they do for checkpoints.
"""

from __future__ import annotations

import bisect
import contextlib
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Literal

from laconic.storage.files import replace

Order = Literal["stop", "checkpoint"]
CHECKPOINT_S = 60.0  # a crash costs no more than about this much work


class Stopping:
    """One rank's side of the agreement in a run's folder; rank 0 decides, and wants checkpoints so far apart.

    Args:
        lead: how many steps ahead rank 0 decides; None for the end of the epoch.
        ends: how many steps have been made at the end of each epoch, where all ranks write a checkpoint anyway.
    """

    def __init__(
        self, folder: Path, rank: int, checkpoint_s: float = CHECKPOINT_S, lead: int | None = 1,
        ends: Sequence[int] = (),
    ) -> None:  # fmt: skip
        self._folder = folder / "control"
        self._rank, self._lead, self._ends = rank, lead, ends
        self._checkpoint_s = checkpoint_s
        self._last_s = time.monotonic()
        self._decided = -1

    def order(self, step: int) -> Order | None:
        """The order for `step`, the same on all ranks; rank 0 also decides for a later step."""
        if self._rank == 0 and self._decided < step:
            self._decide(step)
        try:
            text = (self._folder / str(step)).read_text()
        except FileNotFoundError:
            return None
        return "stop" if text == "stop" else "checkpoint"

    def saved(self) -> None:
        """Note that a checkpoint has just been written."""
        self._last_s = time.monotonic()

    def _decide(self, now: int) -> None:
        stop = is_stop_requested(self._folder.parent)
        end = next(iter(self._ends[bisect.bisect_right(self._ends, now) :]), None)
        ahead = [now + self._lead] if self._lead is not None else []
        step = min([*ahead, *([end] if end is not None else [])], default=now + 1)
        is_due = step != end and time.monotonic() - self._last_s >= self._checkpoint_s
        if stop or is_due:
            self._decided = step
            replace(self._folder / str(step), "stop" if stop else "checkpoint")


@contextlib.contextmanager
def on_signal(handler: Callable[[int, object], None], *signals: int) -> Iterator[None]:
    """Let `handler` take these signals while the block lasts; in the main thread, which alone has signals."""
    if threading.current_thread() is not threading.main_thread():
        signals = ()
    before = {number: signal.signal(number, handler) for number in signals}
    try:
        yield
    finally:
        for number, handled in before.items():
            signal.signal(number, handled)


def request_stop(folder: Path) -> None:
    """Ask the ranks that train into `folder` to write a checkpoint and end."""
    with contextlib.suppress(OSError):
        (folder / "control").mkdir(parents=True, exist_ok=True)
        (folder / "control" / "request").touch()


def is_stop_requested(folder: Path) -> bool:
    """Whether the ranks that train into `folder` have been asked to stop."""
    return os.path.exists(folder / "control" / "request")


def forget(folder: Path) -> None:
    """Remove the requests of an earlier start of the run; before any rank is started."""
    shutil.rmtree(folder / "control", ignore_errors=True)
