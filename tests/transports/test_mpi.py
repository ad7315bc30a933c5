"""MPI ranks, for real: each test runs mpi_program.py under the mpiexec that is installed beside this Python."""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from laconic.errors import MissingExtra
from laconic.transports import mpi

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")]))
PROGRAM = Path(__file__).parent / "mpi_program.py"

pytestmark = [pytest.mark.processes, pytest.mark.alone]
needs_mpi = pytest.mark.skipif(
    MPIEXEC is None or importlib.util.find_spec("mpi4py") is None, reason="mpi4py or mpiexec is not installed"
)


def mpiexec(world_size: int, checks: list[str], folder: Path) -> None:
    """Run some checks on `world_size` ranks; a failure carries the tracebacks."""
    assert MPIEXEC is not None
    command = [MPIEXEC, "-n", str(world_size), sys.executable, str(PROGRAM), *checks]
    environment = {**os.environ, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, env=environment, cwd=folder, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    try:
        _, errors = process.communicate(timeout=60)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        _, errors = process.communicate()
        pytest.fail(f"{checks} on {world_size} ranks did not end in 60 s\n{errors[:4000]}")
    traces = errors[max(0, errors.find("Traceback")) :]  # to the end: ranks write at the same time, line by line
    assert process.returncode == 0, f"{checks} on {world_size} ranks: exit code {process.returncode}\n{traces[:4000]}"


# Starting a world costs seconds (every rank imports torch), so one world makes several checks.


@needs_mpi
@pytest.mark.parametrize("world_size", [3, *(pytest.param(size, marks=pytest.mark.slow) for size in (2, 4))])
def test_conformance_and_native_all_reduce(world_size: int, tmp_path: Path) -> None:
    mpiexec(world_size, ["conformance", "native", "many messages"], tmp_path)


@needs_mpi
def test_mismatch_is_an_error_on_every_rank(tmp_path: Path) -> None:
    mpiexec(3, [f"mismatch:{what}" for what in ("numel", "dtype", "algorithm", "native", "native-numel")], tmp_path)


@needs_mpi
def test_a_rank_that_is_late_stopped_or_has_left_is_named(tmp_path: Path) -> None:
    mpiexec(3, ["timeout", "stop", "leave"], tmp_path)


@needs_mpi
def test_a_failed_check_reaches_the_test(tmp_path: Path) -> None:
    with pytest.raises(AssertionError, match="KeyError: 'no such check'"):
        mpiexec(2, ["no such check"], tmp_path)


def test_a_script_that_initialises_torch_for_one_rank_alone_is_refused(tmp_path: Path) -> None:
    """The DDP example trained three models apart under `mpiexec -n 3`, whose environment each rank sees."""
    example = Path(__file__).parents[2] / "examples" / "ddp_one_line.py"
    environment = {**os.environ, "PMI_RANK": "1", "PMI_SIZE": "3"}
    command = [sys.executable, str(example)]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode != 0
    assert "right; each rank sent" not in done.stdout
    assert "BadInput: mpiexec started 3 ranks, but torch.distributed was initialised for one alone" in done.stderr


def test_without_mpi4py_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingExtra, match=r"laconic\[mpi\]"):
        mpi.MpiTransport()
