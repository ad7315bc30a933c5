"""The process that works on a trial, its owner: trials whose owner is gone are given to others.

Callers: the search. An owner on this machine is gone when its process has ended; one on another machine when its
heartbeat has stopped for LEASE_S. Optuna's own heartbeat works in databases only, and takes a minute to notice that a
process of this machine was killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from optuna.study import Study

from laconic.searching.history import History, Seen

LEASE_S = 60.0  # an owner on another machine that has been silent for so long is gone
BEAT_S = 10.0


class Owner:
    """This process, as an owner of trials.

    Args:
        study: where it writes its heartbeat.
        shared: whether other machines may look; without, nothing is written.
    """

    def __init__(self, study: Study, shared: bool) -> None:
        self.name = f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"
        self._study, self._shared = study, shared
        self._beaten_s = -BEAT_S

    def beat(self) -> None:
        """Write this process's heartbeat, every few seconds."""
        if not self._shared or time.monotonic() < self._beaten_s + BEAT_S:
            return
        self._beaten_s = time.monotonic()
        self._study.set_user_attr(f"beat {self.name}", time.time())

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Beat while the block lasts, also while a trial is evaluated in this process and the search waits for it."""
        over = threading.Event()

        def beats() -> None:
            while not over.wait(BEAT_S / 2):
                with contextlib.suppress(Exception):  # the search meets the same error, and says so
                    self.beat()

        thread = threading.Thread(target=beats, daemon=True)
        if self._shared:
            thread.start()
        try:
            yield
        finally:
            over.set()

    def abandoned(self, history: History) -> list[Seen]:
        """The trials under way whose owner is gone."""
        others = [trial for trial in history.running if trial.owner != self.name]
        if not others:
            return []
        beats = self._study.user_attrs
        return [trial for trial in others if not _lives(trial.owner, beats.get(f"beat {trial.owner}", 0.0))]


def _started(process: int) -> str:
    """When a process began, in the kernel's ticks, since numbers of processes are used again; "" where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _lives(owner: str, beat: float) -> bool:
    host, _, rest = owner.partition(":")
    process, _, started = rest.partition(":")
    if host == socket.gethostname() and process.isdigit():
        return bool(started) and _started(int(process)) == started
    return time.time() < beat + LEASE_S
