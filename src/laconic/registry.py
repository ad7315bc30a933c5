"""One registry for everything that has a name: codecs, modes, workloads, networks, datasets, schedules' algorithms.

Callers: the packages that hold them. Register with a decorator beside the class or function. A registry that knows its
package imports every file of it when a name is first looked up, so that adding an entry is adding a file, and importing
Laconic stays cheap. A package outside Laconic registers by being imported.
"""

from __future__ import annotations

import importlib
import pkgutil
import threading
from collections.abc import Callable, Iterable
from typing import Generic, TypeVar

from laconic.errors import UnknownName

Entry = TypeVar("Entry")
Registered = TypeVar("Registered")


class Registry(Generic[Entry]):
    """Entries by name.

    >>> shapes: Registry[Callable[[], str]] = Registry("shape")
    >>> @shapes.register("square")
    ... def square() -> str:
    ...     return "four sides"
    >>> shapes.names(), shapes.get("square")()
    (['square'], 'four sides')

    Args:
        what: what is registered, for messages: "codec".
        package: whose files register entries; they are imported when a name is first looked up.
    """

    def __init__(self, what: str, package: str = "") -> None:
        self.what = what
        self._entries: dict[str, Entry] = {}
        self._find = Discovery(package)

    def register(self, name: str) -> Callable[[Registered], Registered]:
        """Decorator: register a class or function under `name`, which becomes a class's attribute `name`."""

        def add(entry: Registered) -> Registered:
            if isinstance(entry, type):
                entry.name = name  # type: ignore[attr-defined]
            self.add(name, entry)  # type: ignore[arg-type]
            return entry

        return add

    def add(self, name: str, entry: Entry) -> None:
        """Register an entry under an unused `name`."""
        if name in self._entries:
            raise ValueError(f"{self.what} name '{name}' is taken by {self._entries[name]!r}")
        self._entries[name] = entry

    def names(self) -> list[str]:
        """The registered names, sorted."""
        self._find()
        return sorted(self._entries)

    def get(self, name: str) -> Entry:
        """The entry of that name.

        Raises:
            UnknownName: there is none; the valid ones are listed.
        """
        if name not in self._entries or self._find.begun:
            self._find()  # where another thread is at it, until the file with this name has been read to its end
        if name not in self._entries:
            raise UnknownName(self.what, name, self._entries)
        return self._entries[name]


class Discovery:
    """Imports the files of a package once, at its first call; nested calls see the entries registered so far."""

    def __init__(self, package: str) -> None:
        self._package = package
        self._lock = threading.RLock()
        self._done = not package
        self.begun = False  # by any thread

    def __call__(self) -> None:
        if self._done:
            return
        with self._lock:  # another thread waits until all are there
            if not self.begun:
                self.begun = True
                discover(self._package, importlib.import_module(self._package).__path__)
                self._done = True


def discover(package: str, path: Iterable[str]) -> None:
    """Import every module beside a package's `__init__`, which calls this: `discover(__name__, __path__)`."""
    for module in pkgutil.iter_modules(path):
        importlib.import_module(f"{package}.{module.name}")


def summary_of(entry: object) -> str:
    """The first line of an entry's docstring."""
    return (entry.__doc__ or "").strip().partition("\n")[0]
