"""Files that are whole or not there, wherever the process is killed.

Callers: records, link profiles, checkpoints, journals, views, downloads.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], prefix: str | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` when the block ends well, and disappears when it does not.

    Whoever reads `path`, even after a crash, sees the old file or the new one: a temporary file, fsync, rename, fsync
    of the folder. The folder is made when it is not there.

    Args:
        prefix: how the temporary file's name begins; one that was left behind by a killed process may be removed.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "note") as file:
    ...         _ = file.write(b"whole")
    ...     (Path(folder) / "note").read_text()
    'whole'
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    descriptor, temporary = tempfile.mkstemp(prefix=prefix or f".{target.name}.", dir=target.parent)
    try:
        os.close(descriptor)
        with open(temporary, "r+b") as file:  # opened by name, so that the file knows it
            yield file
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep a shared folder's other readers out
        os.replace(temporary, target)
        _sync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)
        raise


def replace(path: str | os.PathLike[str], text: str) -> Path:
    """Write `text` to `path`, as `replacing` does; returns the path."""
    with replacing(path) as file:
        file.write(text.encode())
    return Path(path)


def create(path: Path, text: str) -> bool:
    """Write a file that appears whole, under a name that nobody has used; False when somebody has.

    Of several processes that create the same file one gets True. The file is its owner's alone.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
    try:
        with open(descriptor, "w", encoding="utf-8") as file:
            file.write(text)
        os.link(temporary, path)  # fails where the name is taken, which a rename does not
        return True
    except FileExistsError:
        return False
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def append(path: Path, lines: Iterable[str], mode: int = 0o644) -> None:
    """Append lines in one write: those of several processes do not mix. The file is made when it is not there.

    What a killed process left of a line stays by itself: the first line begins on a fresh one.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder) / "rows"
    ...     _ = path.write_text("cut o")
    ...     append(path, ["whole"])
    ...     path.read_text()
    'cut o\\nwhole\\n'
    """
    text = "".join(f"{line}\n" for line in lines).encode()
    if not text:
        return
    descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, mode)
    try:
        size = os.fstat(descriptor).st_size
        is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
        os.write(descriptor, b"\n" + text if is_torn else text)
    finally:
        os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Let the file's new name reach the disk too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
