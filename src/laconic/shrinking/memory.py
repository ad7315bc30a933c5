"""What a search has computed, in a folder: a search that was interrupted goes on from there.

Callers: `search.py`, the command line, the benchmark. Numbers and pruned models are trees of tensors; candidates are
`.lac` files that `laconic inspect` reads. Each says what it was computed for, and is used for nothing else.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from laconic.errors import PayloadError
from laconic.shrinking.file import Reader, write
from laconic.shrinking.parts import Part
from laconic.storage import files, tree


class Memory:
    """Results by name, in a folder; without one they are computed each time.

    Args:
        folder: is made where it is not there.
        key: says what results are for; those of another key are computed anew.

    Raises:
        StorageError: there is no such folder, and it cannot be made.
    """

    def __init__(self, folder: Path | None, key: str) -> None:
        self._folder, self._key = folder, key
        if folder is not None:
            with files.writing(folder):  # rather now than after the first training
                folder.mkdir(parents=True, exist_ok=True)

    def recall(self, name: str, compute: Callable[[], Any]) -> Any:
        """What `compute` returned when it was last asked for under this name, a tree of values and tensors."""
        if self._folder is None:
            return compute()
        path = self._folder / f"{name}.state"
        try:
            kept = tree.read_file(path)
            if kept["key"] == self._key:
                return kept["value"]
        except (PayloadError, KeyError, TypeError):
            pass  # missing, cut off or another's: computed anew
        value = compute()
        tree.write_file(path, {"key": self._key, "value": value})
        return value

    def recall_parts(
        self, name: str, compute: Callable[[], tuple[dict[str, Part], float]]
    ) -> tuple[dict[str, Part], float]:
        """The same for the parts of a file and their error."""
        if self._folder is None:
            return compute()
        path = self._folder / f"{name}.lac"
        try:
            reader = Reader(path)
            if reader.about["key"] == self._key:
                return {each: reader.part(each) for each in reader.entries}, float(reader.about["error"])
        except (PayloadError, KeyError, TypeError, ValueError):
            pass
        parts, error = compute()
        write(path, parts, {"key": self._key, "error": error})
        return parts, error
