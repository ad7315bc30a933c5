"""What a chaos job is asked to do, the trap it may hold for one of its ranks, and what every rank writes down.

Callers: `launch.py` makes tasks; `program.py` and the doors run them and keep notes. Everything here travels to other
processes as plain values. Each rank appends lines of JSON to `rank{r}.jsonl` in the task's folder: its process, every
step, that its trap has sprung, and one line with its end, which is what the judge reads.
"""

from __future__ import annotations

import dataclasses
import json
import os
import resource
import signal
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.errors import LaconicError

EVERY = 5  # steps between two checkpoints, and between two evaluations
HELD_S = 60.0  # how long a rank that is held waits for its `go`


class UserError(Exception):
    """Raised on purpose by what stands for a user's own code."""


class Left(BaseException):
    """A rank that is a thread was killed."""


class Late(LaconicError):
    """An elastic training ended without this worker, whose model is not the final one, as its job says."""


@dataclass(frozen=True)
class Trap:
    """Where a rank does something to itself.

    Attributes:
        phase: one of `phases.py`'s.
        step: before this step it does not spring.
        call: how many times the phase is let pass after that: which bucket, which message.
        act: kill, stop (until it is told to go on), hold (the phase waits for a `go`), raise, or forge.
        seed: of what is forged.
    """

    rank: int
    phase: str
    step: int = 0
    call: int = 0
    act: str = "kill"
    seed: int = 0


@dataclass(frozen=True)
class Task:
    """What a job does.

    Attributes:
        door: through which of Laconic's doors; see `doors/`.
        engine: gloo, zmq, mpi or threads; alone, for doors that need none.
        case: the door's: a mode, a division, a method.
        pace_s: how long every step takes at least, so that faults fall into the training.
        checkpoints: a folder; a rank goes on from what it holds, and saves there.
        file_nbytes: the size beyond which no rank can write a file, once there is a file "full" in the folder.
        meeting: where an elastic job meets; None: in its folder.
        workers: how many an elastic job's first step waits for; None: all.
    """

    folder: str
    door: str
    engine: str
    case: str
    codec: str
    ranks: int
    seed: int = 0
    steps: int = 30
    pace_s: float = 0.02
    timeout_s: float = 6.0
    checkpoints: str | None = None
    file_nbytes: int | None = None
    meeting: str | None = None
    workers: int | None = None
    trap: Trap | None = None

    @classmethod
    def of(cls, values: dict[str, Any]) -> Task:
        """The task that travelled as `values_of` gave it."""
        trap = values.get("trap")
        return cls(**{**values, "trap": None if trap is None else Trap(**trap)})

    def values(self) -> dict[str, Any]:
        """As it travels."""
        return dataclasses.asdict(self)


class Notes:
    """What one rank writes down, and its trap."""

    def __init__(self, task: Task, rank: int) -> None:
        self.task, self.rank, self.step = task, rank, -1
        self._path = Path(task.folder, f"rank{rank}.jsonl")
        self._lock, self._passed, self._sprung = threading.Lock(), 0, False

    def add(self, **values: Any) -> None:
        """One line, in one write."""
        line = json.dumps({"t": time.monotonic(), **values}) + "\n"
        descriptor = os.open(self._path, os.O_CREAT | os.O_APPEND | os.O_WRONLY, 0o644)
        os.write(descriptor, line.encode())
        os.close(descriptor)

    def begin(self, step: int) -> None:
        """So many steps are made, and the next begins; a limit on files begins here, too."""
        self.step = step
        task = self.task
        if task.file_nbytes is not None and Path(task.folder, "full").exists():
            resource.setrlimit(resource.RLIMIT_FSIZE, (task.file_nbytes, resource.RLIM_INFINITY))

    def error(self, error: BaseException) -> None:
        """The end of a rank that raised; `typed` where the error is one that Laconic raises on purpose."""
        typed, peer = isinstance(error, LaconicError), getattr(error, "peer", None)
        self.add(end="error", kind=type(error).__name__, text=str(error)[:400], typed=typed, peer=peer)

    def at(self, phase: str) -> bool:
        """The rank is at a phase now: its trap may spring; whether something is to be forged."""
        trap = self.task.trap
        if trap is None or (trap.rank, trap.phase) != (self.rank, phase):
            return False
        with self._lock:  # phases of one rank may be on several threads
            if self._sprung or self.step < trap.step:
                return False
            self._passed += 1
            if self._passed <= trap.call:
                return False
            self._sprung = True
        return self.spring(trap)

    def spring(self, trap: Trap) -> bool:
        """Do what the trap says, to this process or thread; whether something is to be forged."""
        self.add(trapped=trap.phase)
        is_thread = self.task.engine == "threads"
        if trap.act == "kill":
            if is_thread:
                raise Left
            os.kill(os.getpid(), signal.SIGKILL)
        elif trap.act == "raise":
            raise UserError(f"on purpose, on rank {self.rank} in phase {trap.phase}")
        elif trap.act == "stop" and not is_thread:
            os.kill(os.getpid(), signal.SIGSTOP)
        elif trap.act in ("stop", "hold"):
            ends = time.monotonic() + HELD_S
            while not Path(self.task.folder, f"go{self.rank}").exists() and time.monotonic() < ends:
                time.sleep(0.005)
        return trap.act == "forge"
