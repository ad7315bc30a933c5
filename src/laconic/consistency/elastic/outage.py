"""Retry while a meeting place cannot be written or read: full, read-only, without inodes, out of reach.

Callers: `watch.py` (the next view) and `membership.py` (what a newcomer reads). Meanwhile training goes on as long as
the members do not change, and every member keeps the model in memory.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable
from typing import TypeVar

from laconic.errors import StorageError

T = TypeVar("T")
RETRY_S = 0.5  # from one try to the next


class Outage:
    """One operation that is retried; warns at its first failure.

    Args:
        what: what cannot be written or read, and by whom, as the beginning of a sentence.
        patience_s: how long to try.
        kept: what is still intact, and what to do about it, as the end of the sentence when patience is over.
        deed: written or read.
    """

    def __init__(self, what: str, patience_s: float, kept: str, deed: str = "written") -> None:
        self._what, self._patience_s, self._kept, self._deed = what, patience_s, kept, deed
        self._since: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it has failed at least once."""
        return self._since is not None

    def failed(self, error: StorageError) -> None:
        """Note one more failure.

        Raises:
            StorageError: patience is over.
        """
        if self._since is None:
            self._since = time.monotonic()
            text = f"{self._what} cannot be {self._deed}; trying again for {self._patience_s:g} s at most"
            warnings.warn(f"{text}: {error}", stacklevel=2)
        if time.monotonic() - self._since >= self._patience_s:
            text = f"{self._what} could not be {self._deed} for {self._patience_s:g} s: {error}"
            raise StorageError(f"{text}; {self._kept}", error.errno) from error


def outlast(read: Callable[[], T], where: str, patience_s: float) -> T:
    """Call `read` until the meeting place can be read, and return its result.

    Raises:
        StorageError: it could not for `patience_s`.
    """
    outage = Outage(f"the meeting place {where}", patience_s, "the model is with the members", "read")
    while True:
        try:
            return read()
        except StorageError as error:
            outage.failed(error)
            time.sleep(RETRY_S)
