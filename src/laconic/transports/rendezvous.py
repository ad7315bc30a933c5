"""Find this process's rank and store: under torchrun, mpiexec, srun, our own launcher, or alone; watch the launcher.

Callers: `laconic.init`. The store (a torch.distributed Store) is where ranks first meet: it carries addresses, beats
and failure notes, never gradients.
"""

from __future__ import annotations

import logging
import multiprocessing
import os
import queue
import re
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
_set_here: set[str] = set()  # variables of torch's that were made of Slurm's
_LAUNCHER = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_SLURM = ("SLURM_JOB_ID", "SLURM_LOCALID", "SLURM_PROCID", "SLURM_STEP_NODELIST", "SLURM_STEP_NUM_TASKS")
_SKYPILOT = ("SKYPILOT_NODE_IPS", "SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
SLURM_PORTS = range(20000, 32000)  # below what the kernel gives out; two for each step: torch's and ours


@dataclass(frozen=True)
class Place:
    """This process's place in the job.

    Attributes:
        launcher: "torchrun" (also our own launcher, and a process group that exists already), "mpiexec", "srun",
            "skypilot" or "alone".
        store: where the ranks meet; None under mpiexec, where MPI itself introduces them.
        store_host: the rank whose process holds the store, None when no rank does.
    """

    rank: int
    world_size: int
    launcher: str
    store: dist.Store | None
    store_host: int | None = None


def find_place(timeout_s: float, engine: str | None = None) -> Place:
    """Read the environment and join the store; under Slurm, by MPI where that is the engine.

    Raises:
        BadInput: when the launcher's environment is incomplete, not numbers or not torch.distributed's, or
            its port is in use.
    """
    if dist.is_available() and dist.is_initialized():
        _refuse_ranks_apart()
        store = dist.distributed_c10d._get_default_store()
        agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        return Place(dist.get_rank(), dist.get_world_size(), "torchrun", store, None if agent else 0)
    if "RANK" in os.environ and "WORLD_SIZE" in os.environ and not _set_here:
        return _from_torchrun(timeout_s)
    by_mpiexec = "OMPI_COMM_WORLD_RANK" in os.environ  # inside an allocation of Slurm's
    if "SLURM_STEP_ID" in os.environ and engine != "mpi" and not by_mpiexec:
        return _from_slurm(timeout_s)
    if any(name in os.environ for name in _MPI_RANK):
        return _from_mpi()
    if os.environ.get("SKYPILOT_NUM_NODES", "1") != "1":
        return _from_skypilot(timeout_s)
    if half := {"RANK", "WORLD_SIZE"} & os.environ.keys() - _set_here:
        (there,) = half
        (missing,) = {"RANK", "WORLD_SIZE"} - half
        raise BadInput(f"{there} is set but {missing} is not; start with torchrun, or unset {there} to train alone")
    return Place(0, 1, "alone", dist.HashStore())


def _refuse_ranks_apart() -> None:
    """Refuse a process group of one under mpiexec: every rank would silently train a model of its own."""
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
    rank, world_size, port = _numbers("RANK", "WORLD_SIZE", "MASTER_PORT")
    if not 0 <= rank < world_size:
        raise BadInput(f"RANK is {rank} and WORLD_SIZE {world_size}: ranks are numbered from 0 to WORLD_SIZE - 1")
    agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    store = _met(os.environ["MASTER_ADDR"], port, rank, world_size, rank == 0 and not agent, timeout_s)
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, world_size, "torchrun", dist.PrefixStore(f"laconic/r{restart}", store), None if agent else 0)


def _from_slurm(timeout_s: float) -> Place:
    """A task of `srun`: rank 0 holds the store, on the first host of the step.

    torch's own variables are set too, unless they are set already, so that `init_process_group()` works as under
    torchrun; it gets the port before ours.
    """
    missing = [name for name in _SLURM if name not in os.environ]
    if missing:
        raise BadInput(f"SLURM_STEP_ID is set but {', '.join(missing)} is not; start each task by srun")
    rank, world_size, local_rank, job, step = _numbers(
        "SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_JOB_ID", "SLURM_STEP_ID"
    )
    port = SLURM_PORTS.start + 2 * ((job + step) % (len(SLURM_PORTS) // 2))
    store = _met_beside(first_host(os.environ["SLURM_STEP_NODELIST"]), port, rank, world_size, local_rank, timeout_s)
    restart = os.environ.get("SLURM_RESTART_COUNT", "0")
    return Place(rank, world_size, "srun", dist.PrefixStore(f"laconic/r{restart}", store), 0)


def _from_skypilot(timeout_s: float) -> Place:
    """A node of a SkyPilot task that started the script itself, once: rank 0 is on the first node."""
    missing = [name for name in _SKYPILOT if not os.environ.get(name, "").strip()]
    if missing:
        raise BadInput(f"SKYPILOT_NUM_NODES is set but {', '.join(missing)} is not; start it in a task's `run`")
    rank, world_size = _numbers("SKYPILOT_NODE_RANK", "SKYPILOT_NUM_NODES")
    first = os.environ["SKYPILOT_NODE_IPS"].split()[0]
    store = _met_beside(first, SLURM_PORTS.start, rank, world_size, 0, timeout_s)
    return Place(rank, world_size, "skypilot", dist.PrefixStore("laconic/r0", store), 0)


def _met_beside(host: str, port: int, rank: int, world_size: int, local_rank: int, timeout_s: float) -> dist.Store:
    """Set torch's variables, unless they are set already, and meet at the port after torch's."""
    own = {
        "MASTER_ADDR": host, "MASTER_PORT": str(port), "RANK": str(rank), "WORLD_SIZE": str(world_size),
        "LOCAL_RANK": str(local_rank),
    }  # fmt: skip
    _set_here.update(own.keys() - os.environ.keys())
    for name, value in own.items():
        os.environ.setdefault(name, value)
    (port,) = _numbers("MASTER_PORT")
    return _met(os.environ["MASTER_ADDR"], port + 1, rank, world_size, rank == 0, timeout_s)


def first_host(nodes: str) -> str:
    """The first name of a list of hosts in Slurm's spelling.

    >>> first_host("gpu[007-009,12],login"), first_host("a1,a2"), first_host("rack2-[3,5]-ib")
    ('gpu007', 'a1', 'rack2-3-ib')
    """
    first = re.match(r"[^,\[]*(?:\[[^\]]*\][^,\[]*)*", nodes)
    return re.sub(r"\[([^\],-]*)[^\]]*\]", r"\1", first[0] if first else nodes)


def _numbers(*names: str) -> list[int]:
    """Variables of a launcher that are whole numbers."""
    try:
        return [int(os.environ[name]) for name in names]
    except ValueError as error:
        raise BadInput(f"{', '.join(names[:-1])} and {names[-1]} must be whole numbers: {error}") from error


def _met(host: str, port: int, rank: int, world_size: int, is_master: bool, timeout_s: float) -> dist.Store:
    """The store at `host:port`, or the sentence that says why there is none."""
    where = f"{host}:{port}"
    try:
        return _joined(host, port, world_size, is_master, timeout_s)
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


def new_store(host: str = "127.0.0.1") -> dist.TCPStore:
    """A store of this process, at a free port of one address: torch's own would listen on all interfaces."""
    with socket.create_server((host, 0), backlog=1024) as listening:
        port = listening.getsockname()[1]
        return dist.TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach())


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
    """A thread that checks that the store still answers, and ends a rank whose launcher was killed.

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
