"""Write files atomically: complete or absent, even if the process is killed.

Callers: records, link profiles, checkpoints, journals, views, downloads. Invariant: every failure to write, such as a
full disk, is a StorageError, raised in one place (`writing`).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

from laconic.errors import BadInput, StorageError


@contextlib.contextmanager
def writing(path: str | os.PathLike[str], intact: str | None = None) -> Iterator[None]:
    """Turn any failure to write `path` inside the block into one StorageError.

    Args:
        intact: what is there all the same, for the end of the sentence; None when the file is replaced or new.

    >>> with writing("runs/notes", intact="the notes before are intact"):
    ...     raise OSError(28, "No space left on device")
    Traceback (most recent call last):
    ...
    laconic.errors.StorageError: runs/notes cannot be written: No space left on device; the notes before are intact
    """
    if intact is None:
        intact = "the file that was there is intact" if os.path.exists(path) else "there was no such file before"
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        why = error.strerror or str(error)
        raise StorageError(f"{os.fspath(path)} cannot be written: {why}; {intact}", error.errno) from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], prefix: str | None = None) -> Iterator[BinaryIO]:
    """Open a temporary file that becomes `path` when the block ends well, and disappears when it does not.

    Whoever reads `path`, even after a crash, sees the old file or the new one: a temporary file, fsync, rename, fsync
    of the folder. The folder is created if missing.

    Args:
        prefix: how the temporary file's name begins; one that was left behind by a killed process may be removed.

    Raises:
        StorageError: it cannot be written, and is as it was. What the block itself raises passes unchanged.

    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with replacing(Path(folder) / "note") as file:
    ...         _ = file.write(b"whole")
    ...     (Path(folder) / "note").read_text()
    'whole'
    """
    target = Path(path)
    with writing(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        descriptor, temporary = tempfile.mkstemp(prefix=prefix or f".{target.name}.", dir=target.parent)
        os.close(descriptor)
        file = open(temporary, "r+b")  # noqa: SIM115  (by name, so that the file knows it; closed below)
    try:
        try:
            yield file
            with writing(target):
                file.flush()
                os.fsync(file.fileno())
        finally:
            with writing(target):  # it writes what the buffer still holds
                file.close()
        with writing(target):
            os.chmod(temporary, 0o644)  # mkstemp's 0600 would keep a shared folder's other readers out
            os.replace(temporary, target)
            _sync_folder(target.parent)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise


def replace(path: str | os.PathLike[str], content: str | bytes) -> Path:
    """Write `content` to `path`, as `replacing` does; returns the path."""
    with replacing(path) as file, writing(path):
        file.write(content.encode() if isinstance(content, str) else content)
    return Path(path)


def folder_of(given: str | os.PathLike[str]) -> Path:
    """The folder that a user named; BadInput when it is no path."""
    if not isinstance(given, str | os.PathLike):
        raise BadInput(f"a folder is named by a path, got {given!r}")
    return Path(given)


def cache_folder() -> Path:
    """The folder for data that can be recomputed: `$LACONIC_CACHE`, else `laconic` in the user's cache folder."""
    named = os.environ.get("LACONIC_CACHE")
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")  # Path's own raises without a home
    return Path(named) if named else Path(base) / "laconic"


def create(path: Path, text: str) -> bool:
    """Create a file atomically under an unused name; False if the name is taken.

    Of several processes that create the same file one gets True. The file is its owner's alone.

    Raises:
        StorageError: it cannot be written, and is not there.
    """
    temporary = path.parent / f".{path.name}.{secrets.token_hex(4)}"
    with writing(path, "nothing of it is there"):
        descriptor = os.open(temporary, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600)
        try:
            with open(descriptor, "w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(descriptor)  # a name that a crash leaves without its text could never be used again
            os.link(temporary, path)  # fails where the name is taken, which a rename does not
            _sync_folder(path.parent)
            return True
        except FileExistsError:
            return False
        finally:
            with contextlib.suppress(OSError):
                os.unlink(temporary)


def append(path: Path, lines: Iterable[str], mode: int = 0o644) -> None:
    """Append lines in one write: those of several processes do not mix. The file is created if missing.

    A partial line of a killed process stays separate: the first line begins on a new one.

    Raises:
        StorageError: not all of it could be written; the lines before are intact.

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
    with writing(path, "the lines before are intact"):
        descriptor = os.open(path, os.O_CREAT | os.O_APPEND | os.O_RDWR, mode)
        try:
            size = os.fstat(descriptor).st_size
            is_torn = size > 0 and os.pread(descriptor, 1, size - 1) != b"\n"
            left = b"\n" + text if is_torn else text
            while left:  # a disk that is nearly full takes a part, and says why only when asked for the rest
                left = left[os.write(descriptor, left) :]
        finally:
            os.close(descriptor)


def _sync_folder(folder: Path) -> None:
    """Flush the file's new name to disk, too."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
