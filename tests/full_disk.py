"""Disks that take no more, for tests: without root a limit on a file's size, with root a small file system."""

from __future__ import annotations

import contextlib
import os
import resource
import shlex
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

needs_mounts = pytest.mark.skipif(
    os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode != 0,
    reason="mounting a small file system needs root",
)


@contextlib.contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """While the block lasts no file of this process, or of one that it starts, grows beyond `nbytes`."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def run_on_small_disk(
    folder: Path, size: str, *commands: Sequence[str], then: str = "1g"
) -> list[subprocess.CompletedProcess[str]]:
    """Run commands with `folder` on a file system of `size`, which has `then` after the first; it goes with them."""
    names = [folder.parent / f"said-{number}" for number in range(len(commands))]
    script = [f"mount -t tmpfs -o size={size} full {shlex.quote(str(folder))}"]
    for name, words in zip(names, commands, strict=True):
        script.append(f"{shlex.join(words)} >{name}.out 2>{name}.err; echo $? >{name}.code")
        script.append(f"mount -o remount,size={then} {shlex.quote(str(folder))}")
    subprocess.run(["unshare", "-m", "bash", "-c", "\n".join(script)], check=True, timeout=280)
    done = []
    for name, words in zip(names, commands, strict=True):
        code, out, err = (Path(f"{name}.{kind}").read_text() for kind in ("code", "out", "err"))
        done.append(subprocess.CompletedProcess(words, int(code), out, err))
    return done
