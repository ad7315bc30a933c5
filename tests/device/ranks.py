"""Two processes with a fake device each, in which all cases run: forked for the first, ended after the last."""

from __future__ import annotations

import contextlib
import os
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from multiprocessing.connection import Connection, Listener
from pathlib import Path
from typing import Any

import pytest

from tests.device import fake_device

ENDED = "the process ended"
PATIENCE_S = 120.0
AFTER_AN_ERROR_S = 10.0  # for the other rank, which may wait for the one that failed


class Ranks:
    """The two processes; they are made anew after a case that hangs.

    They are forks of a third one, which has imported what they need, so that seconds of imports are paid once.
    """

    def __init__(self) -> None:
        self._processes: list[tuple[int, Connection]] = []  # with the number of each
        self._server: subprocess.Popen[str] | None = None

    def run(self, module: str, case: str, killed: int | None = None) -> None:
        """Run a case on both ranks; fails with what went wrong on either, or if the one to be `killed` lives on."""
        if not self._processes:
            self._start()
        answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for rank, (_, pipe) in enumerate(self._processes):
            pipe.send((module, case))
            threading.Thread(target=self._listen, args=(rank, pipe, answers), daemon=True).start()
        failures: list[str] = []
        for _ in self._processes:
            patience_s = AFTER_AN_ERROR_S if failures else PATIENCE_S
            try:
                rank, answer = answers.get(timeout=patience_s)
            except queue.Empty:
                failures.append(f"{case} did not end on the other rank in {patience_s:g} s")
                break
            if rank == killed:
                answer = None if answer == ENDED else f"it was to be killed: {answer}"
            if answer is not None:
                failures.append(f"rank {rank}: {answer}")
        if failures or killed is not None:
            self.close()  # whatever the case left must not meet the next one
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    def _start(self) -> None:
        fake_device.build()
        if self._server is None:
            command = [sys.executable, "-m", "tests.device.rank"]
            self._server = subprocess.Popen(command, stdin=subprocess.PIPE, text=True)
        assert self._server.stdin is not None
        folder = Path(tempfile.mkdtemp())
        for rank in range(2):
            with Listener(str(folder / f"rank-{rank}"), "AF_UNIX") as listener:
                self._server.stdin.write(f"{rank} {folder / 'store'} {listener.address}\n")
                self._server.stdin.flush()
                pipe = listener.accept()
            self._processes.append((pipe.recv(), pipe))

    @staticmethod
    def _listen(rank: int, pipe: Connection, answers: queue.SimpleQueue[tuple[int, Any]]) -> None:
        try:
            answers.put((rank, pipe.recv()))
        except (EOFError, OSError):
            answers.put((rank, ENDED))

    def close(self) -> None:
        """End the two processes."""
        for number, pipe in self._processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            pipe.close()
        self._processes = []

    def end(self) -> None:
        """End all of it."""
        self.close()
        if self._server is not None:
            self._server.communicate()
