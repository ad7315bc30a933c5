"""Results that are kept on disk once they are computed, each in a file of its own.

Callers: the tuner and the planner, for what was measured on this machine; a search of `laconic.shrink`, which goes on
from what it keeps; tasks on code. A file says what its result is and what it was made from, and is used for nothing
else: one that is foreign or damaged counts as absent, and its result is computed again.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar

from laconic.errors import PayloadError, StorageError
from laconic.storage import files, tree
from laconic.storage.fingerprint import fingerprint
from laconic.storage.typed_json import from_plain, to_plain

T = TypeVar("T")
_log = logging.getLogger("laconic.storage")


@dataclass(frozen=True)
class MemoForm(Generic[T]):
    """How results are written.

    Attributes:
        suffix: of the files.
        read: the key in a file and its result; PayloadError, or a Lookup-, Type- or ValueError, where it holds none.
        write: a result with its key into a file.
    """

    suffix: str
    read: Callable[[Path], tuple[str, T]]
    write: Callable[[Path, str, T], None]


def _read_tree(path: Path) -> tuple[str, Any]:
    found = tree.read_file(path)
    return str(found["key"]), found["value"]


def _write_tree(path: Path, key: str, value: Any) -> None:
    tree.write_file(path, {"key": key, "value": value})


TREE: MemoForm[Any] = MemoForm(".state", _read_tree, _write_tree)  # plain values and tensors


class Memo:
    """Results by name.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     memo = Memo(Path(folder), "seed 1")
    ...     memo.recall("sum", lambda: 1 + 2), memo.recall("sum", lambda: 0), Memo(Path(folder), "seed 2").get("sum")
    (3, 3, None)

    Args:
        folder: is made where it is not there; None keeps nothing.
        made_from: what all results depend on: settings, data, functions (see `fingerprint`).
        required: a folder that cannot be written is an error, and not only logged.

    Raises:
        StorageError: the folder is required, and cannot be made.
    """

    def __init__(self, folder: Path | None, *made_from: Any, required: bool = False) -> None:
        self.folder, self._made_from, self._required = folder, fingerprint(*made_from), required
        if folder is not None and required:
            with files.writing(folder):  # rather now than after the first result
                folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, kind: type[T] | None = None, form: MemoForm[Any] = TREE) -> T | None:
        """What is kept under a name; None where nothing is.

        Args:
            kind: a dataclass, or a tuple or dictionary of plain values or of such, if it is one.
        """
        if self.folder is None:
            return None
        path, key = self._place(name, form)
        try:
            found, value = form.read(path)
            if found != key:
                return None
            kept: T = value if kind is None else from_plain(kind, value, name)
            return kept
        except (PayloadError, LookupError, TypeError, ValueError, AttributeError) as error:
            if path.exists():
                _log.warning("%s cannot be used, and is made again: %s", path, error)
            return None

    def put(self, name: str, value: T, kind: type[T] | None = None, form: MemoForm[Any] = TREE) -> None:
        """Keep a result; `kind` is as for `get`.

        Raises:
            StorageError: it cannot be written, and the folder is required.
        """
        if self.folder is None:
            return
        path, key = self._place(name, form)
        try:
            form.write(path, key, value if kind is None else to_plain(value))
        except StorageError as error:
            if self._required:
                raise
            _log.warning("a result is not kept: %s", error)

    def recall(self, name: str, compute: Callable[[], T], form: MemoForm[T] = TREE) -> T:
        """What is kept under a name, or what `compute` gives, which is kept from now on."""
        found: T | None = self.get(name, None, form)
        if found is None:
            found = compute()
            self.put(name, found, None, form)
        return found

    def _place(self, name: str, form: MemoForm[Any]) -> tuple[Path, str]:
        assert self.folder is not None
        key = fingerprint(self._made_from, name)
        readable = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:40]
        return self.folder / f"{readable}-{key[:12]}{form.suffix}", key
