"""Run a measurement on N ranks: local processes, or this process itself when torchrun or mpiexec started it.

Callers: probe, bench and demo commands. The function runs on every rank; rank 0's value counts.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from laconic.errors import BadInput, UnknownName
from laconic.transports.launcher import run_local
from laconic.transports.world import ENGINES


def is_launched() -> bool:
    """Whether torchrun, mpiexec or our own launcher started this process as one of several."""
    return launched_rank() is not None


def launched_rank() -> int | None:
    """This process's rank from its launcher's variables; None without a launcher."""
    for name in ("RANK", "PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK"):
        if name in os.environ:
            return int(os.environ[name])
    return None


def run_job(
    ranks: int, engine: str | None, function: Callable[..., Any], args: tuple[Any, ...], timeout_s: float = 600.0
) -> Any:
    """Rank 0's value of `function(*args)`, run on every rank; None on the other ranks of a launched job.

    Args:
        ranks: how many local processes to start; ignored when launched.
        engine: handed to `laconic.init` through LACONIC_ENGINE.
        function: importable; arguments and result JSON-able, so that MPI jobs need no pickle.
    """
    if engine is not None and engine not in ENGINES:
        raise UnknownName("engine", engine, ENGINES)
    if is_launched():
        if engine is not None:
            os.environ["LACONIC_ENGINE"] = engine
        value = function(*args)
        return value if launched_rank() == 0 else None
    if not 1 <= ranks <= 256:
        raise BadInput(f"between 1 and 256 local ranks can be started, got {ranks}")
    if engine == "mpi":
        from laconic.transports.mpi_launcher import run_mpi

        return run_mpi(ranks, function, args, timeout_s)
    environment = {"LACONIC_ENGINE": engine} if engine is not None else None
    return run_local(ranks, function, args, timeout_s, environment)[0]
