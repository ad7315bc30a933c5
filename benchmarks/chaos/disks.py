"""Small disks that can be full, or only be read: a tmpfs, which needs root.

Callers: `faults/disk.py` and `meetings.py`.
"""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

DISK_NBYTES = 2 << 20


def can_mount() -> bool:
    """Whether this process may mount a tmpfs."""
    if os.geteuid() != 0:
        return False
    with tempfile.TemporaryDirectory() as folder, small_disk(Path(folder)) as mounted:
        return mounted


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A tmpfs of two megabytes at `folder`, as long as the block lasts; False where that is not allowed."""
    folder.mkdir(parents=True, exist_ok=True)
    done = mount("-t", "tmpfs", "-o", f"size={DISK_NBYTES}", "chaos", str(folder))
    try:
        yield done
    finally:
        if done:
            subprocess.run(["umount", "-l", str(folder)], capture_output=True)


def mount(*words: str) -> bool:
    """Call `mount`; whether it could."""
    return subprocess.run(["mount", *words], capture_output=True).returncode == 0


def fill(folder: Path) -> Path:
    """Take all that is left of a disk; returns the file that holds it."""
    path = folder / "filler"
    for size in (1 << 12, 1):
        with contextlib.suppress(OSError), open(path, "ab", buffering=0) as file:
            while True:
                file.write(bytes(size))
    return path
