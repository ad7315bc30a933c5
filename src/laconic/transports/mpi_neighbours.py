"""Which MPI ranks of this machine have stopped or died: MPI itself never says so.

Caller: `mpi.py`, at a time-out. Ranks tell each other their machine and process number when they open a transport. Of
ranks on other machines nothing is known.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

_STOPPED = "TtZX"  # by a signal, by a debugger, and two ways to be dead


def own_card() -> tuple[int, int]:
    """This process as two numbers: its machine and space of process numbers (0: unknown), and its number there."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return 0, os.getpid()
    digest = hashlib.blake2b(machine.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") + 1, os.getpid()


def stopped(cards: list[tuple[int, int]]) -> list[int]:
    """The ranks, by their cards, that are on this machine and stopped or dead.

    >>> stopped([own_card()])
    []
    """
    machine, _ = own_card()
    return [rank for rank, (where, pid) in enumerate(cards) if machine and where == machine and not _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return text.rsplit(")", 1)[1].split()[0] not in _STOPPED
