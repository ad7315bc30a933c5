"""Who am I, and where is the store: torchrun, mpiexec, Laconic's own launcher, or alone.

Callers: `laconic.init`. The store (a torch.distributed Store) is where ranks first meet: it carries addresses, beats
and failure notes, never gradients.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from laconic.errors import BadInput, CollectiveTimeout, MissingExtra
from laconic.transports.leftovers import sweep_shared_memory

_MPI_RANK = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK")
_MPI_SIZE = ("PMI_SIZE", "OMPI_COMM_WORLD_SIZE")
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
    try:
        store = dist.TCPStore(
            os.environ["MASTER_ADDR"],
            port,
            world_size,
            is_master=rank == 0 and not agent,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
        )
    except RuntimeError as error:
        where = f"{os.environ['MASTER_ADDR']}:{port}"
        if "EADDRINUSE" in str(error):
            raise BadInput(
                f"[rank {rank}/{world_size}]: port {port} of this machine is in use by another program, perhaps by an "
                "earlier job that has not ended; choose another MASTER_PORT"
            ) from error
        text = f"[rank {rank}/{world_size}]: the store at {where} was not reached in {timeout_s:g} s: {error}"
        raise CollectiveTimeout(text.splitlines()[0], rank=rank) from error
    restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return Place(rank, world_size, "torchrun", dist.PrefixStore(f"laconic/r{restart}", store), None if agent else 0)


def _from_mpi() -> Place:
    try:
        from mpi4py import MPI
    except ImportError as error:
        raise MissingExtra("mpi4py", "mpi") from error
    if MPI.COMM_WORLD.Get_rank() == 0:
        sweep_shared_memory()
    return Place(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size(), "mpiexec", None)
