"""Runs a function on N local MPI ranks by the mpiexec of the pip-installed MPI; the counterpart of `launcher.py`.

Callers: the command line. Arguments and result travel as JSON through a folder that is removed afterwards.
"""

from __future__ import annotations

import importlib
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from laconic.errors import MissingExtra
from laconic.transports.launcher import RankFailed
from laconic.transports.leftovers import sweep_shared_memory


def find_mpiexec() -> str:
    """The mpiexec beside this Python, else the one on PATH."""
    beside = Path(sys.executable).with_name("mpiexec")
    found = str(beside) if beside.exists() else shutil.which("mpiexec")
    if found is None:
        raise MissingExtra("an MPI (mpiexec)", "mpi")
    return found


def run_mpi(world_size: int, function: Callable[..., Any], args: tuple[Any, ...] = (), timeout_s: float = 300.0) -> Any:
    """Run `function(*args)` on `world_size` MPI ranks; returns rank 0's value. Both must be JSON-able."""
    sweep_shared_memory()
    with tempfile.TemporaryDirectory(prefix="laconic-mpi-") as folder:
        answer = Path(folder) / "answer.json"
        task = json.dumps([function.__module__, function.__qualname__, list(args), str(answer)])
        command = [find_mpiexec(), "-n", str(world_size), sys.executable, "-m", __name__, task]
        job = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            out, err = job.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired as error:
            raise RankFailed(f"the MPI job of {world_size} ranks did not finish in {timeout_s:g} s") from error
        finally:
            _end(job)
        if job.returncode != 0 or not answer.exists():
            raise RankFailed(f"mpiexec exited with {job.returncode}:\n{err or out}")
        return json.loads(answer.read_text())


def _end(job: subprocess.Popen[str]) -> None:
    """Stop a running job, first by SIGTERM, so that mpiexec removes its ranks and their shared memory."""
    if job.poll() is None:
        job.terminate()
        try:
            job.wait(timeout=5)
        except subprocess.TimeoutExpired:
            job.kill()
            job.wait()


def _rank_main() -> None:
    import torch
    from mpi4py import MPI

    torch.set_num_threads(1)
    module, name, args, answer = json.loads(sys.argv[1])
    value = getattr(importlib.import_module(module), name)(*args)
    if MPI.COMM_WORLD.Get_rank() == 0:
        Path(answer).write_text(json.dumps(value))


if __name__ == "__main__":
    _rank_main()
