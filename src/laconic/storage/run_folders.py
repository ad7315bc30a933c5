"""Folders of runs and searches: made for one, and locked while it writes there."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import chain, count
from pathlib import Path

from laconic.errors import BadInput
from laconic.storage.files import writing


def make_folder(workload: str, runs: str | os.PathLike[str], now: datetime | None = None) -> Path:
    """Make the folder of a new run, `runs`/20261116-101500-digits-mlp: the time (UTC), the workload, a number if taken.

    It is this run's alone, even if others begin in the same second.

    Raises:
        BadInput: the workload's name cannot be part of a file name.
        StorageError: it cannot be made.
    """
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", workload):
        raise BadInput(f"a workload's name is letters, digits, '.', '_' and '-', got '{workload}'")
    stem = f"{(now or datetime.now(UTC)).strftime('%Y%m%d-%H%M%S')}-{workload}"
    names = chain([stem], (f"{stem}-{number}" for number in count(2)))
    while True:
        folder = Path(runs) / next(names)
        with writing(folder, "the runs before are intact"):
            folder.parent.mkdir(parents=True, exist_ok=True)
            with contextlib.suppress(FileExistsError):
                folder.mkdir()
                return folder


@contextlib.contextmanager
def only_one(folder: Path) -> Iterator[None]:
    """Lock `folder` against other trainings until the block or this process ends.

    Raises:
        BadInput: another process trains into it.
    """
    marker = folder / ".running"
    descriptor = _locked(marker)
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            marker.unlink()
        os.close(descriptor)


def _locked(marker: Path) -> int:
    """Open and lock the file; once more where its last owner has removed it in between."""
    while True:
        with writing(marker):
            descriptor = os.open(marker, os.O_CREAT | os.O_RDWR, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            raise BadInput(f"{marker.parent} is still running: wait for its end, or stop it") from None
        except OSError:  # a file system without locks
            return descriptor
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(descriptor), os.stat(marker)):
                return descriptor
        os.close(descriptor)
