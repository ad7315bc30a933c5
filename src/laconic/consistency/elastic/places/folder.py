"""A folder that all workers share: a disk on one machine, NFS between several.

A name is a file. `create` is a hard link that fails where the name is taken, so the folder's links must be atomic.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import ClassVar

from laconic.consistency.elastic.places.base import FOLDER, PLACES
from laconic.errors import BadInput, StorageError
from laconic.storage.files import append, create, folder_of, replace


@PLACES.register(FOLDER)
class FolderPlace:
    """The folder of one job; made when it is not there, readable by its owner only."""

    is_quick: ClassVar[bool] = True

    def __init__(self, where: str | Path) -> None:
        self.folder = folder_of(where)
        self.where = str(where)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BadInput(f"workers cannot meet in {where}: {error.strerror}") from None

    def create(self, name: str, text: str) -> bool:
        return create(self.folder / name, text)

    def replace(self, name: str, text: str) -> None:
        replace(self.folder / name, text)

    def append(self, name: str, lines: Iterable[str]) -> None:
        append(self.folder / name, lines, mode=0o600)

    def read(self, name: str) -> bytes | None:
        with self._reading():
            try:
                return (self.folder / name).read_bytes()
            except FileNotFoundError:
                os.stat(self.folder)  # a folder that is gone is no empty one
                return None

    def names(self, prefix: str = "") -> list[str]:
        with self._reading():
            return [name for name in os.listdir(self.folder) if name.startswith(prefix) and name[0] != "."]

    def close(self) -> None:
        pass

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"{error.filename or self.folder} cannot be read: {error.strerror}"
            raise StorageError(text, error.errno) from error
