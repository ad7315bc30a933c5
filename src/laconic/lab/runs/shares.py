"""Shares of work that workers take as they are ready, so that a quick one does more than a slow one.

Callers: `free.py`. A number in a file, under the file's lock: the workers of a comparison are processes of one
machine, on emulated hosts too.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


def shares_file(folder: Path, order: int) -> Path:
    """The file of a run's `order`-th trial."""
    return folder / f".shares-{order}"


class Shares:
    """Shares 0, 1, … total − 1, each handed out once.

    Args:
        path: the file; whoever comes first makes it.
        total: how many there are.
    """

    def __init__(self, path: Path, total: int) -> None:
        self.path, self.total = path, total
        self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)

    def take(self) -> int | None:
        """The next share, or None when all have been handed out."""
        fcntl.flock(self._file, fcntl.LOCK_EX)
        try:
            taken = int.from_bytes(os.pread(self._file, 8, 0), "little")
            if taken >= self.total:
                return None
            os.pwrite(self._file, (taken + 1).to_bytes(8, "little"), 0)
            return taken
        finally:
            fcntl.flock(self._file, fcntl.LOCK_UN)

    def close(self) -> None:
        """Let go of the file, which stays until `remove`."""
        os.close(self._file)

    def remove(self) -> None:
        """Delete the file; once, after all have closed it."""
        self.path.unlink(missing_ok=True)
