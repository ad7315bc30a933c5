"""Starts N local processes as one job: the default on one machine, without torchrun.

Callers: the command line, the demo, benchmarks and tests. The parent holds the store, so it outlives any rank. The
first error of any rank reaches the caller with its traceback, and the other ranks are then stopped. Ranks do not
outlive the parent.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import pickle
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, Generic, TypeVar, cast

import torch.distributed as dist

from laconic import errors
from laconic.errors import LaconicError
from laconic.transports import namespace
from laconic.transports.leftovers import sweep_sockets
from laconic.transports.rendezvous import new_store

T = TypeVar("T")
WARM = "laconic.warm"  # by name only: it imports what lies above this file
# The fork server's socket lies in the temporary folder, and a socket's path has at most 107 characters.
LONGEST_SOCKET_FOLDER = 70
GRACE_S = 0.2  # when a rank fails, how long to look for one that was killed: the others' errors only follow from that


class RankFailed(LaconicError):
    """A local rank raised, died or ran out of time; carries the first traceback, and which rank where one is known."""

    def __init__(self, message: str, rank: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank


def ending(exitcode: int | None) -> str:
    """Describe how a process ended without a result.

    >>> ending(-9), ending(3)
    ('was killed by SIGKILL', 'ended with exit code 3')
    """
    if exitcode is not None and exitcode < 0:
        known = {int(each): each.name for each in signal.Signals}
        return f"was killed by {known.get(-exitcode, f'signal {-exitcode}')}"
    return f"ended with exit code {exitcode}"


def _failure(outcome: Outcome[Any]) -> LaconicError:
    """The error of a rank as ours: in one sentence when it was meant for the user, else with the rank's traceback."""
    rank = outcome.rank
    if outcome.error is None:
        return RankFailed(f"rank {rank} {ending(outcome.exitcode)}", rank)
    kind = getattr(errors, outcome.error_type or "", None)
    sentence = f"rank {rank}: {outcome.error.splitlines()[0].partition(': ')[2]}"
    if kind is errors.StorageError:
        return errors.StorageError(sentence)
    if isinstance(kind, type) and issubclass(kind, errors.BadInput | errors.ProfileError):
        return RankFailed(sentence, rank)
    return RankFailed(f"rank {rank}: {outcome.error}", rank)


@dataclass(frozen=True)
class Outcome(Generic[T]):
    """The outcome of one rank: its value, its error text, or the exit code of a process that left neither."""

    rank: int
    value: T | None = None
    error: str | None = None
    error_type: str | None = None
    exitcode: int | None = None

    @property
    def failed(self) -> bool:
        """Whether there is no value."""
        return self.error is not None or self.exitcode is not None


@dataclass(frozen=True)
class Host:
    """Where a rank runs: an emulated host of this machine.

    Attributes:
        number: ranks with the same number are on the same host.
        environment: variables for the ranks of this host.
        network: the path of the network namespace they run in; None is this process's own.
    """

    number: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)
    network: str | None = None


def rank_variables(hosts: Sequence[Host], store: dist.TCPStore) -> list[dict[str, str]]:
    """Each rank's variables, as torchrun sets them, for ranks on these hosts that meet in a store of their parent's."""
    numbers = [host.number for host in hosts]
    return [
        {
            "RANK": str(rank),
            "WORLD_SIZE": str(len(hosts)),
            "LOCAL_RANK": str(numbers[:rank].count(host.number)),
            "LOCAL_WORLD_SIZE": str(numbers.count(host.number)),
            "GROUP_RANK": str(host.number),
            "GROUP_WORLD_SIZE": str(len(set(numbers))),
            "MASTER_ADDR": store.host,
            "MASTER_PORT": str(store.port),
            "TORCHELASTIC_USE_AGENT_STORE": "True",
        }
        for rank, host in enumerate(hosts)
    ]


def _child(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    environment: Mapping[str, str],
    network: str | None,
    pipe: Connection,
) -> None:
    try:
        if network is not None:
            namespace.enter(network)  # before any thread or socket exists
        os.environ.update(environment)
        threading.Thread(target=_end_with_parent, name="laconic-parent", daemon=True).start()
        import torch

        torch.set_num_threads(1)
        # By value: torch's own way of sending tensors needs the sender to be alive when they are read.
        answer = pickle.dumps((True, function(*args)))
    except BaseException as error:
        pipe.send_bytes(pickle.dumps((False, (type(error).__name__, str(error), traceback.format_exc()))))
        raise SystemExit(1) from None
    pipe.send_bytes(answer)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        wait([parent.sentinel])
        os._exit(1)


def start_fork_server(*modules: str) -> None:
    """Start the fork server of ranks now, and let it import `modules` too; a running one is left as it is."""
    if process_context(*modules).get_start_method() == "forkserver":
        forkserver.ensure_running()


def process_context(*modules: str) -> Any:
    """How ranks are started: by a fork server, which imports what they need once and forks before any thread exists."""
    if len(tempfile.gettempdir()) > LONGEST_SOCKET_FOLDER:
        return multiprocessing.get_context("spawn")
    _sweep_once()
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([WARM, *modules])
    return context


@functools.cache
def _sweep_once() -> None:
    sweep_sockets()


class LocalJob(Generic[T]):
    """N processes that run `function(*args)` under RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT, as under torchrun.

    Args:
        environment: further variables for every rank.
        store: where the ranks meet, when not on this machine's loopback.
        hosts: each rank's host; by default all are on this one.
    """

    def __init__(
        self,
        world_size: int,
        function: Callable[..., T],
        args: tuple[Any, ...] = (),
        environment: Mapping[str, str] | None = None,
        *,
        store: dist.TCPStore | None = None,
        hosts: Sequence[Host] | None = None,
    ) -> None:
        context = process_context()
        self.store = store or new_store()
        hosts = hosts or [Host()] * world_size
        # the fork server keeps those of its own start
        shared = {**os.environ, "OMP_NUM_THREADS": "1", **(environment or {})}
        self.pipes: list[Connection] = []
        self.processes = []
        for host, own in zip(hosts, rank_variables(hosts, self.store), strict=True):
            ours, theirs = context.Pipe(duplex=False)
            place = ({**shared, **host.environment, **own}, host.network)
            process = context.Process(target=_child, args=(function, args, *place, theirs), daemon=True)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def outcomes(self, timeout_s: float, ranks: Collection[int] | None = None) -> list[Outcome[T]]:
        """Wait for `ranks` (all when None), then end the job; a rank silent by then is killed and has exit code −9."""
        wanted = set(range(len(self.pipes)) if ranks is None else ranks)
        found = {outcome.rank: outcome for outcome in self._answers(wanted, timeout_s)}
        self.stop()
        silent = {rank: Outcome[T](rank, exitcode=self.processes[rank].exitcode) for rank in wanted - found.keys()}
        return [outcome for _, outcome in sorted({**found, **silent}.items())]

    def results(self, timeout_s: float) -> list[T]:
        """Every rank's value; RankFailed with the first traceback as soon as one fails, the rest being stopped.

        A rank that could not write a file gives a StorageError, because the caller's files may be on the same disk.
        """
        waiting = set(range(len(self.pipes)))
        values: dict[int, T] = {}
        try:
            for outcome in self._answers(waiting, timeout_s):
                waiting.discard(outcome.rank)
                if outcome.failed:
                    raise _failure(self._cause(outcome, waiting))
                values[outcome.rank] = cast(T, outcome.value)
            if waiting:
                raise RankFailed(f"ranks {sorted(waiting)} did not finish in {timeout_s:g} s")
        finally:
            self.stop()
        return [values[rank] for rank in range(len(self.processes))]

    def _cause(self, first: Outcome[T], others: Collection[int]) -> Outcome[T]:
        """The failure that explains the others: of a rank that died without an error, or else the first."""
        if first.error is None:
            return first
        return next((each for each in self._answers(others, GRACE_S) if each.exitcode is not None), first)

    def _answers(self, ranks: Collection[int], timeout_s: float) -> Iterator[Outcome[T]]:
        """Yield the outcomes of `ranks` as they end, for at most `timeout_s`."""
        deadline = time.monotonic() + timeout_s
        pipes = {self.pipes[rank]: rank for rank in ranks}
        while pipes and (ready := wait(list(pipes), timeout=max(0.0, deadline - time.monotonic()))):
            for pipe in ready:
                yield self._read(pipes.pop(cast(Connection, pipe)))

    def _read(self, rank: int) -> Outcome[T]:
        try:
            fine, value = pickle.loads(self.pipes[rank].recv_bytes())
        except (EOFError, ConnectionResetError):
            self.processes[rank].join(timeout=5)
            return Outcome(rank, exitcode=self.processes[rank].exitcode)
        if fine:
            return Outcome(rank, value=value)
        kind, message, trace = value
        return Outcome(rank, error=f"{kind}: {message}\n{trace}", error_type=kind)

    def stop(self) -> None:
        """End every process of this job."""
        for process in self.processes:
            process.join(timeout=0.2)
        self.kill()

    def kill(self) -> None:
        """End every process of this job without waiting for it to finish."""
        for process in self.processes:
            if process.is_alive():
                process.kill()
            process.join(timeout=5)


def run_local(
    world_size: int,
    function: Callable[..., T],
    args: tuple[Any, ...] = (),
    timeout_s: float = 120.0,
    environment: Mapping[str, str] | None = None,
) -> list[T]:
    """Run `function(*args)` in `world_size` local processes; returns every rank's value, by rank.

    `function` must be importable (a module's top level), as for multiprocessing.

    >>> run_local(1, int, ("7",))
    [7]
    """
    return LocalJob(world_size, function, args, environment).results(timeout_s)
