"""Any program on an emulated cluster, one process a rank, under the variables that torchrun sets.

Callers: `laconic run`. What ranks print is printed here, line by line, each with its rank. The first rank that fails
ends all. Ranks do not outlive this process, however it ends, and what they started ends with them.
"""

from __future__ import annotations

import os
import re
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from laconic.transports.launcher import GRACE_S, ending, rank_variables
from laconic_lab.clusters import enter
from laconic_lab.clusters.cluster import Cluster, core_of

STOP_S = 3.0  # how long ranks may take to end when they are asked to, before they are killed
LONGEST_LINE_NBYTES = 1 << 16  # longer ones are printed in parts


@dataclass(frozen=True)
class Failed:
    """The rank that ended the job, and how it ended."""

    rank: int
    host: int
    exitcode: int

    @property
    def code(self) -> int:
        """As a shell gives it: 128 more than the signal for one that was killed."""
        return self.exitcode if self.exitcode >= 0 else 128 - self.exitcode

    def __str__(self) -> str:
        return f"rank {self.rank} on host {self.host} {ending(self.exitcode)}"


class Lines:
    """Splits a rank's output into whole lines; of a line overwritten in place, keeps the last state.

    >>> Lines().taken(b"half a li")
    []
    >>> lines = Lines(); lines.taken(b"10 %\\r20 %\\nne"), lines.taken(b"xt\\nlast"), lines.rest()
    (['20 %'], ['next'], ['last'])
    """

    def __init__(self) -> None:
        self._held = b""

    def taken(self, data: bytes) -> list[str]:
        """The lines that `data` completes."""
        *whole, self._held = (self._held + data).split(b"\n")
        if len(self._held) > LONGEST_LINE_NBYTES:
            whole.append(self._held)
            self._held = b""
        return [_shown(line) for line in whole]

    def rest(self) -> list[str]:
        """The unterminated last line."""
        held, self._held = self._held, b""
        return [_shown(held)] if held else []


class Tracebacks:
    """Filters Python's tracebacks out of a rank's output; `last` is the error of the last one.

    >>> tracebacks = Tracebacks()
    >>> tracebacks.without(["saved", "Traceback (most recent call last):", "  File …", "KeyboardInterrupt", "bye"])
    ['saved', 'bye']
    >>> tracebacks.last
    'KeyboardInterrupt'
    """

    def __init__(self) -> None:
        self.last = ""
        self._inside = False

    def without(self, lines: Sequence[str]) -> list[str]:
        """The lines that belong to no traceback."""
        return [line for line in lines if not self._belongs(line)]

    def _belongs(self, line: str) -> bool:
        line = _RANK.sub("", line)
        if line.startswith(_BEFORE_TRACEBACK):
            self._inside = line.startswith("Traceback")
            return True
        if self._inside and line.strip() and not line.startswith(" "):
            self.last, self._inside = line, False
            return True
        return self._inside or not line.strip()


_RANK = re.compile(r"^\[rank\d+\]: ?")  # torch puts it before each line of a traceback
# The first line of a traceback, and what leads to one.
_BEFORE_TRACEBACK = (
    "Traceback (most recent call last)",
    "During handling of the above exception",
    "The above exception was the direct cause",
    "Exception in thread",
    "Exception ignored in",
)


def _shown(line: bytes) -> str:
    return line.rstrip(b"\r").rpartition(b"\r")[2].decode(errors="replace")


class Programs:
    """A program on every rank of an open cluster; a context manager that leaves no process behind.

    Args:
        cluster: where it runs.
        command: the program and its arguments; the program by its path.
        ranks_per_host: processes on each host.
        pin: give each host one core of this machine, in turn.
    """

    def __init__(self, cluster: Cluster, command: Sequence[str], ranks_per_host: int = 1, pin: bool = False) -> None:
        self.cluster = cluster
        self._hosts = cluster.places(ranks_per_host)
        self._store = cluster.new_store()
        self._selector = selectors.DefaultSelector()
        self._lines: dict[int, Lines] = {}
        self._tracebacks: dict[int, Tracebacks] = {}  # by rank, once it is interrupted
        self._running: set[int] = set()
        self.processes: list[subprocess.Popen[bytes]] = []
        shared = {**os.environ, "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")}
        try:
            for host, own in zip(self._hosts, rank_variables(self._hosts, self._store), strict=True):
                core = str(core_of(host.number)) if pin else enter.NO_CORE
                place = [str(os.getpid()), str(host.network), core]
                environment = {**shared, **host.environment, **own, **_torchrun(own)}
                self._start([sys.executable, enter.__file__, *place, *command], environment)
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Programs:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _start(self, command: Sequence[str], environment: dict[str, str]) -> None:
        rank, pipe = len(self.processes), subprocess.PIPE
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=pipe, stderr=pipe, start_new_session=True
        )  # a session of its own: Ctrl-C reaches a rank through `stop` alone
        self.processes.append(process)
        self._running.add(rank)
        self._selector.register(os.pidfd_open(process.pid), selectors.EVENT_READ, (rank, None))
        for stream, shown in ((process.stdout, sys.stdout), (process.stderr, sys.stderr)):
            assert stream is not None
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ, (rank, shown))
            self._lines[stream.fileno()] = Lines()

    def wait(self, *, keep_going: bool = False) -> Failed | None:
        """Print the ranks' output until all have ended or one has failed; returns the one that failed.

        With `keep_going` until all have ended; one that fails is named at once, and returned if no rank ended well.
        """
        failed: list[Failed] = []
        while self._running and (keep_going or not failed):
            for each in self._serve(None):
                failed.append(each)
                if keep_going and self._running:
                    sys.stderr.write(f"laconic: {each}; the others go on\n")
        if keep_going and len(failed) < len(self.processes):
            return None
        if failed:  # one that was killed explains the others, whose errors only follow from that
            self._serve_for(GRACE_S, failed)
        return next((each for each in failed if each.exitcode < 0), failed[0] if failed else None)

    def stop(self, number: signal.Signals = signal.SIGTERM) -> None:
        """Ask every rank to end by a signal, and give them `STOP_S` to do so.

        Of one that is interrupted (SIGINT) the last error is printed in place of its tracebacks.
        """
        if number == signal.SIGINT:
            self._tracebacks = {rank: Tracebacks() for rank in self._running}
        self._signal(number)
        self._serve_for(STOP_S, [])

    def close(self) -> None:
        """Kill running ranks and print the remaining output; safe to call twice."""
        self._signal(signal.SIGKILL)
        self._running.clear()
        for process in self.processes:
            process.wait()
        for each in _processes_on({str(host.network) for host in self._hosts}):
            with suppress(ProcessLookupError):
                os.kill(each, signal.SIGKILL)
        for key in list(self._selector.get_map().values()):
            rank, shown = key.data
            if shown is None:
                self._forget(key.fd)
            else:
                self._print(rank, key.fileobj, shown, to_the_end=True)
        for rank, tracebacks in self._tracebacks.items():
            sys.stderr.write(f"[{rank}] {tracebacks.last}\n" if tracebacks.last else "")
        self._tracebacks.clear()

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._running:
            with suppress(ProcessLookupError):
                os.killpg(self.processes[rank].pid, number)

    def _serve_for(self, seconds: float, failed: list[Failed]) -> None:
        """Serve for so long, or until all ranks have ended; adds to `failed`."""
        ends = time.monotonic() + seconds
        while self._running and (left := ends - time.monotonic()) > 0:
            failed += self._serve(left)

    def _serve(self, timeout_s: float | None) -> list[Failed]:
        """Print new output; returns the ranks that have failed meanwhile."""
        failed = []
        for key, _ in self._selector.select(timeout_s):
            rank, shown = key.data
            if shown is not None:
                self._print(rank, key.fileobj, shown)
                continue
            self._forget(key.fd)
            self._running.discard(rank)
            exitcode = self.processes[rank].wait()
            if exitcode:
                failed.append(Failed(rank, self._hosts[rank].number, exitcode))
        return failed

    def _print(self, rank: int, stream: Any, shown: IO[str], to_the_end: bool = False) -> None:
        """Print the readable output; at the end of the stream, or if it is the last call, the last line too."""
        lines, data = self._lines[stream.fileno()], stream.read()
        printed = lines.taken(data or b"")
        if to_the_end or data == b"":  # None: nothing yet
            printed += lines.rest()
            self._selector.unregister(stream)
            stream.close()
        if rank in self._tracebacks:
            printed = self._tracebacks[rank].without(printed)
        shown.write("".join(f"[{rank}] {line}\n" for line in printed))
        shown.flush()

    def _forget(self, descriptor: int) -> None:
        self._selector.unregister(descriptor)
        os.close(descriptor)


def _processes_on(networks: set[str]) -> list[int]:
    """The processes that are in one of these network namespaces, whoever started them."""
    wanted = {os.stat(network).st_ino for network in networks}
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # it ended while we looked
            if os.stat(folder / "ns/net").st_ino in wanted:
                found.append(int(folder.name))
    return found


def _torchrun(own: dict[str, str]) -> dict[str, str]:
    """torchrun's variables besides a rank's place: one role, no restarts."""
    return {
        "ROLE_NAME": "default",
        "ROLE_RANK": own["RANK"],
        "ROLE_WORLD_SIZE": own["WORLD_SIZE"],
        "TORCHELASTIC_RESTART_COUNT": "0",
        "TORCHELASTIC_MAX_RESTARTS": "0",
        "TORCHELASTIC_RUN_ID": "laconic",
    }
