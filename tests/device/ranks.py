"""Two processes with a fake device each, in which all cases run: started for the first, ended after the last."""

from __future__ import annotations

import json
import queue
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.device import fake_device

ENDED = "the process ended: {}"
PATIENCE_S = 120.0
AFTER_AN_ERROR_S = 10.0  # for the other rank, which may wait for the one that failed


class Ranks:
    """The two processes; they are made anew after a case that hangs."""

    def __init__(self) -> None:
        self._processes: list[subprocess.Popen[str]] = []

    def run(self, module: str, case: str, killed: int | None = None) -> None:
        """Run a case on both ranks; fails with what went wrong on either, or if the one to be `killed` lives on."""
        if not self._processes:
            self._start()
        answers: queue.SimpleQueue[tuple[int, Any]] = queue.SimpleQueue()
        for rank, process in enumerate(self._processes):
            assert process.stdin is not None
            process.stdin.write(f"{module} {case}\n")
            process.stdin.flush()
            threading.Thread(target=self._listen, args=(rank, process, answers), daemon=True).start()
        failures: list[str] = []
        for _ in self._processes:
            patience_s = AFTER_AN_ERROR_S if failures else PATIENCE_S
            try:
                rank, answer = answers.get(timeout=patience_s)
            except queue.Empty:
                failures.append(f"{case} did not end on the other rank in {patience_s:g} s")
                break
            if rank == killed:
                answer = None if answer == ENDED.format(-signal.SIGKILL) else f"it was to be killed: {answer}"
            if answer is not None:
                failures.append(f"rank {rank}: {answer}")
        if failures or killed is not None:
            self.close()  # whatever the case left must not meet the next one
        if failures:
            pytest.fail("\n".join(failures), pytrace=False)

    def _start(self) -> None:
        fake_device.build()
        folder = Path(tempfile.mkdtemp())
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", "tests.device.rank", str(rank), str(folder / "store")],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for rank in range(2)
        ]

    @staticmethod
    def _listen(rank: int, process: subprocess.Popen[str], answers: queue.SimpleQueue[tuple[int, Any]]) -> None:
        assert process.stdout is not None
        line = process.stdout.readline()
        answers.put((rank, json.loads(line) if line else ENDED.format(process.wait())))

    def close(self) -> None:
        """End the processes."""
        for process in self._processes:
            process.kill()
            process.wait()
        self._processes = []
