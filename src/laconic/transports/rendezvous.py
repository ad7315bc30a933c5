"""Who am I, and where is the store: torchrun, mpiexec, Laconic's own launcher, or alone; and does the launcher live.

Callers: `laconic.init`. The store (a torch.distributed Store) is where ranks first meet: it carries addresses, beats
and failure notes, never gradients.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import signal
import socket
import threading
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from laconic.errors import BadInput, CollectiveTimeout, MissingExtra, PeerLost
from laconic.transports.base import Transport
from laconic.transports.leftovers import sweep_shared_memory

LOOK_S = 1.0
_log = logging.getLogger("laconic.transports")
_MPI_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_MPI_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
_held: dict[tuple[str, int], dist.Store] = {}  # that this process serves, by address
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Place:
    """This process's place in the job.

    Attributes:
        launcher: "torchrun" (also our own launcher, and a process group that exists already), "mpiexec" or "alone".
        store: where the ranks meet; None under mpiexec, where MPI itself introduces them.
        store_host: the rank whose process holds the store, None when no rank does.
    """

    rank: int
    world_size: int
    launcher: str
    store: dist.Store | None
    store_host: int | None = None


def find_place(timeout_s: float) -> Place:
    """Read the environment and join the store.

    Raises:
        BadInput: when the launcher's environment is incomplete, not numbers or not torch.distributed's, or
            its port is in use.
    """
    if dist.is_available() and dist.is_initialized():
        _refuse_ranks_apart()
        store = dist.distributed_c10d._get_default_store()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Place(dist.get_rank(), dist.get_world_size(), "torchrun", store, None if agent else 0)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ:
        return _from_torchrun(timeout_s)
    if any(name in os.environ for name in _MPI_RANK):
        return _from_mpi()
    return Place(0, 1, "alone", dist.HashStore())


def _refuse_ranks_apart() -> None:
    """Refuse a process group of one under mpiexec: every rank would train a model of its own without a word."""
    if dist.get_world_size() > 1 or "RANK" in os.environ:
        return
    size = next((os.environ[name] for name in _MPI_SIZE if name in os.environ), "1")
    if size != "1":
        raise BadInput(
            f"mpiexec started {size} ranks, but torch.distributed was initialised for one alone: give it "
            "MPI's rank and world size, start with torchrun, or leave torch.distributed out and call laconic.init"
        )


def _from_torchrun(timeout_s: float) -> Place:
    missing = [name for name in _LAUNCHER if name not in os.environ]
    if missing:
        raise BadInput(f"RANK is set but {', '.join(missing)} is not; start with torchrun, or unset RANK")
    try:
        rank, world_size, port = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    except ValueError as error:
        raise BadInput(f"RANK, WORLD_SIZE and MASTER_PORT must be whole numbers: {error}") from error
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    where = f"{os.environ['MASTER_ADDR']}:{port}"
    try:
        store = _joined(os.environ["MASTER_ADDR"], port, world_size, rank == 0 and not agent, timeout_s)
    except TimeoutError:
        text = f"[rank {rank}/{world_size}]: what listens at {where} has not answered as a store in {timeout_s:g} s"
        raise CollectiveTimeout(f"{text}; choose another MASTER_PORT", rank=rank) from None
    except RuntimeError as error:
        if "EADDRINUSE" in str(error):
            raise BadInput(
                f"[rank {rank}/{world_size}]: port {port} of this machine is in use by another program, perhaps by an "
                "earlier job that has not ended; choose another MASTER_PORT"
            ) from error
        text = f"[rank {rank}/{world_size}]: the store at {where} was not reached in {timeout_s:g} s: {error}"
        raise CollectiveTimeout(text.splitlines()[0], rank=rank) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, world_size, "torchrun", dist.PrefixStore(f"laconic/r{restart}", store), None if agent else 0)


def new_store(host: str = "127.0.0.1") -> dist.TCPStore:
    """A store of this process, at a free port of one address: torch's own would listen on all interfaces."""
    with socket.create_server((host, 0), backlog=1024) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )


def _joined(host: str, port: int, world_size: int, is_master: bool, timeout_s: float) -> dist.Store:
    """The store there; a master makes it once and holds it for as long as its process lives, so that all ranks can meet
    there again. torch waits without end for a program that listens there and never answers, so it waits on a thread,
    which stays behind when the time is up."""
    if is_master and (held := _held.get((host, port))) is not None:
        return held
    came: queue.SimpleQueue[dist.Store | BaseException] = queue.SimpleQueue()

    def join() -> None:
        try:
            limit = timedelta(seconds=timeout_s)
            came.put(dist.TCPStore(host, port, world_size, is_master, timeout=limit, wait_for_workers=False))
        except BaseException as error:
            came.put(error)

    threading.Thread(target=join, name="laconic-store", daemon=True).start()
    try:
        found = came.get(timeout=timeout_s + LOOK_S)
    except queue.Empty:
        raise TimeoutError from None
    if isinstance(found, BaseException):
        raise found
    if is_master:
        _held[host, port] = found
    return found


def _from_mpi() -> Place:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtra("mpi4py", "mpi") from error
    if MPI.COMM_WORLD.Get_rank() == 0:
        sweep_shared_memory()
    return Place(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), "mpiexec", None)


class LauncherWatch:
    """A thread that looks whether the store still answers, and ends a rank whose launcher was killed.

    When the store is gone every later call on the world raises; an orphan that makes none, as in asynchronous modes,
    gets the SIGTERM that torchrun's agent would have sent.
    """

    def __init__(self, store: dist.Store, transport: Transport) -> None:
        self._store = store
        self._transport = transport
        self._parent = os.getppid()
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="laconic-launcher", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop looking; a store that is frozen may keep the thread."""
        self._closed.set()
        if self._thread is not threading.current_thread():
            self._thread.join(timeout=LOOK_S)

    def _run(self) -> None:
        while not self._is_gone():
            if self._closed.wait(LOOK_S):
                return
        transport = self._transport
        text = f"{transport.where()}: the launcher was lost: the store it holds is gone"
        _log.error("%s", text)
        transport.break_off(PeerLost(text, rank=transport.rank))
        if not self._closed.wait(transport.timeout_s) and os.getppid() != self._parent:
            _log.error("[rank %d]: ending this process, whose launcher was killed", transport.rank)
            os.kill(os.getpid(), signal.SIGTERM)

    def _is_gone(self) -> bool:
        try:
            self._store.check(["launcher"])
        except RuntimeError as error:  # a slow store is not gone
            return isinstance(error, dist.DistNetworkError)
        return False


def watch_launcher(place: Place, transport: Transport) -> LauncherWatch | None:
    """Watch torchrun's agent; None where there is none, or where ranks end with their parent anyway."""
    agent = place.launcher == "torchrun" and place.store_host is None
    clone = getattr(place.store, "clone", None)
    if not agent or clone is None or multiprocessing.parent_process() is not None:
        return None
    return LauncherWatch(clone(), transport)
