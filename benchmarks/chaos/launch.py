"""Starts the real processes of a chaos job, does to them what a fault asks for, and says how each of them ended.

Callers: the faults. Local ranks come from Laconic's own fork server, those of MPI from `mpiexec`, a search is a command
of its own, and ranks on hosts of their own come from an emulated cluster. Whatever is left of a job is killed when its
`with` block ends.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.chaos import program
from benchmarks.chaos.task import Task
from laconic.transports.launcher import LocalJob
from laconic.transports.mpi_launcher import find_mpiexec
from laconic_lab.clusters.cluster import Cluster

START_S = 120.0  # until the first step: ranks import torch, and other work may keep the cores busy
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Ending:
    """What became of one rank.

    Attributes:
        what: finished; error; died, when its process ended without a word; waits, when it had not ended in time.
        kind: of the error, and `typed` whether it is one of Laconic's.
        digest: of the weights of a rank that finished, and the most memory that its process ever held.
        seconds: after the fault.
    """

    rank: int
    what: str
    kind: str = ""
    text: str = ""
    typed: bool = False
    peer: int | None = None
    digest: int | None = None
    finite: bool = True
    peak_nbytes: int = 0
    seconds: float = 0.0


class Running:
    """The processes of one job; a context manager.

    Args:
        hosts: of the cluster, where each rank runs; None: one on each.
        environment: variables for all ranks on the cluster.
    """

    def __init__(
        self,
        task: Task,
        run: Callable[[dict[str, Any]], None] = program.run,
        cluster: Cluster | None = None,
        hosts: Sequence[int] | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        self.task = task
        self.folder = Path(task.folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._offsets: dict[int, int] = {}
        self._lines: dict[int, list[dict[str, Any]]] = {rank: [] for rank in range(task.ranks)}
        self.closed = False
        self.job: LocalJob[None] | None = None
        self.command: subprocess.Popen[bytes] | None = None
        values = task.values()
        if task.engine == "mpi" or task.door == "search":  # a process of the fork server could have none of its own
            command = [sys.executable, "-m", "benchmarks.chaos.program", json.dumps(values)]
            launcher = [find_mpiexec(), "-n", str(task.ranks)] if task.engine == "mpi" else []
            environment = {**os.environ, "OMP_NUM_THREADS": "1"}
            with open(self.folder / "log", "wb") as log:
                self.command = subprocess.Popen(
                    [*launcher, *command], cwd=ROOT, env=environment, stdout=log, stderr=log
                )
        elif cluster is not None:
            self.job = cluster.start(run, (values,), environment=environment, hosts=hosts)
        else:
            self.job = LocalJob(1 if task.engine == "threads" else task.ranks, run, (values,))

    def __enter__(self) -> Running:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End every process of the job, the stopped ones too; safe to call twice."""
        if self.closed:
            return
        self.closed = True
        pids = [pid for rank in range(self.task.ranks) if (pid := self.pid(rank)) is not None]
        if self.job is not None:
            self.job.kill()
            for pipe in self.job.pipes:
                pipe.close()
        if self.command is not None:
            alive = [pid for pid in pids if _is_alive(pid)]
            if self.command.poll() is None:
                self.command.terminate()
            for pid in alive:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.command.wait(timeout=3)
            self.command.kill()
            self.command.wait()

    # what the ranks have written

    def notes(self, rank: int) -> list[dict[str, Any]]:
        """All lines of a rank so far."""
        path = self.folder / f"rank{rank}.jsonl"
        if path.exists():
            with open(path, "rb") as file:
                file.seek(self._offsets.get(rank, 0))
                data = file.read()
            whole = data[: data.rfind(b"\n") + 1]
            self._offsets[rank] = self._offsets.get(rank, 0) + len(whole)
            self._lines[rank] += [json.loads(line) for line in whole.splitlines()]
        return self._lines[rank]

    def step(self, rank: int) -> int:
        """The last step a rank has made; −1 before it has begun."""
        return max((each.get("step", each.get("begin", -1)) for each in self.notes(rank)), default=-1)

    def pid(self, rank: int) -> int | None:
        """The process of a rank, once it runs."""
        return next((each["pid"] for each in self.notes(rank) if "pid" in each), None)

    def trapped(self, rank: int) -> bool:
        """Whether the trap of a rank has sprung."""
        return any("trapped" in each for each in self.notes(rank))

    def end(self, rank: int) -> dict[str, Any] | None:
        """What a rank wrote down about its end."""
        return next((each for each in self.notes(rank) if "end" in each), None)

    # what is done to them

    def kill(self, rank: int) -> None:
        """SIGKILL of a process."""
        self._signal(rank, signal.SIGKILL)

    def stop(self, rank: int) -> None:
        """SIGSTOP of a process."""
        self._signal(rank, signal.SIGSTOP)

    def release(self, rank: int) -> None:
        """Let a rank go on that is held."""
        (self.folder / f"go{rank}").touch()

    def go_on(self, rank: int) -> None:
        """Let a rank go on that is stopped, or held."""
        self.release(rank)
        if self.task.engine != "threads":
            self._signal(rank, signal.SIGCONT)

    def _signal(self, rank: int, number: int) -> None:
        pid = self.pid(rank)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, number)

    # waiting

    def until(self, done: Callable[[], bool], limit_s: float) -> bool:
        """Wait until `done()`; whether that came within the time."""
        deadline = time.monotonic() + limit_s
        while not done():
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def has_ended(self, rank: int) -> bool:
        """Whether a rank is over: its process is gone."""
        if self.task.engine == "threads":
            assert self.job is not None
            trap = self.task.trap
            killed = trap is not None and (trap.rank, trap.act) == (rank, "kill") and self.trapped(rank)
            return killed or self.end(rank) is not None or not self.job.processes[0].is_alive()
        if self.job is not None:
            return not self.job.processes[rank].is_alive()
        assert self.command is not None
        pid = self.pid(rank)
        return self.command.poll() is not None or (pid is not None and not _is_alive(pid))

    def endings(self, ranks: Collection[int], limit_s: float) -> list[Ending]:
        """How these ranks ended, or that they had not, and nobody had got any further for `limit_s`."""
        begun = time.monotonic()
        while not self.until(lambda: all(self.has_ended(rank) for rank in ranks), limit_s):
            latest = max((each["t"] for rank in range(self.task.ranks) for each in self.notes(rank)), default=begun)
            if time.monotonic() - latest >= limit_s:
                break
        return [self._ending(rank, begun) for rank in sorted(ranks)]

    def _ending(self, rank: int, begun: float) -> Ending:
        over, told = self.has_ended(rank), self.end(rank)
        if not over:
            return Ending(rank, "waits", text=f"at step {self.step(rank)}", seconds=time.monotonic() - begun)
        if told is None:
            return Ending(rank, "died", text=f"without a word, after step {self.step(rank)}")
        names = ("kind", "text", "typed", "peer", "digest", "finite", "peak_nbytes")
        kept = {key: told[key] for key in names if key in told}
        return Ending(rank, told["end"], seconds=told["t"] - begun, **kept)


def _is_alive(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return False
    return state not in "ZX"
