"""Remove leftovers of killed jobs: dead sockets of fork servers, and MPI's shared memory.

Callers: the launchers, and ranks under mpiexec, when they start. Remove only files of this user that are older than a
minute and unused; keep a file in doubt.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import socket
import stat
import tempfile
import time
from pathlib import Path

OLD_S = 60.0  # a job that is starting makes a file before it uses it
SHARED_MEMORY = Path("/dev/shm")
_MPI_SEGMENTS = ("mpich_shm_*", "vader_segment.*", "sm_segment.*")  # of MPICH; the others of Open MPI
_log = logging.getLogger("laconic.transports")


def sweep_sockets(folder: Path | None = None) -> list[Path]:
    """Remove multiprocessing's folders (`pymp-*`) that hold nothing but sockets nobody listens at; returns them."""
    swept = []
    for each in (folder or Path(tempfile.gettempdir())).glob("pymp-*"):
        with contextlib.suppress(OSError):
            content = list(each.iterdir())
            if content and _is_old_and_ours(each) and all(_is_dead_socket(path) for path in content):
                shutil.rmtree(each)
                swept.append(each)
    return _logged(swept)


def sweep_shared_memory(folder: Path = SHARED_MEMORY) -> list[Path]:
    """Remove MPI's segments that no process has mapped; returns them."""
    found = [path for pattern in _MPI_SEGMENTS for path in folder.glob(pattern) if _is_old_and_ours(path)]
    if not found or (used := _mapped_files()) is None:
        return []
    swept = []
    for path in found:
        if str(path) not in used:
            with contextlib.suppress(OSError):
                path.unlink()
                swept.append(path)
    return _logged(swept)


def _logged(swept: list[Path]) -> list[Path]:
    if swept:
        _log.info("removed what killed jobs had left behind: %s", ", ".join(map(str, swept)))
    return swept


def _is_old_and_ours(path: Path) -> bool:
    try:
        facts = path.lstat()
    except OSError:
        return False
    return facts.st_uid == os.getuid() and time.time() - facts.st_mtime > OLD_S and not stat.S_ISLNK(facts.st_mode)


def _is_dead_socket(path: Path) -> bool:
    if not stat.S_ISSOCK(path.lstat().st_mode):
        return False
    # A datagram finds out whether anybody listens without disturbing whoever does: a fork server ends at an empty call.
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as knock, contextlib.suppress(OSError):
        return knock.connect_ex(str(path)) == errno.ECONNREFUSED
    return False


def _mapped_files() -> set[str] | None:
    """Every file that a process of this user has mapped; None if that cannot be determined."""
    used: set[str] = set()
    try:
        processes = [each for each in Path("/proc").iterdir() if each.name.isdigit()]
    except OSError:
        return None
    for process in processes:
        try:
            if process.stat().st_uid == os.getuid():
                lines = (process / "maps").read_text().splitlines()
                used.update(line.split(maxsplit=5)[5] for line in lines if line.count("/"))
        except OSError:
            continue  # it has ended, or is none that its own user may look into, and so no rank
    return used
