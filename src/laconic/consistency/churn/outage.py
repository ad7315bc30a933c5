"""A meeting folder that cannot be written to for a while: full, read-only, without inodes.

Callers: `watch.py` (the next view) and `membership.py` (a newcomer's number), which try again until it works. Training
that needs no change of members goes on meanwhile, and the model stays in every member's memory.
"""

from __future__ import annotations

import time
import warnings

from laconic.errors import StorageError

RETRY_S = 0.5  # from one try to the next


class Outage:
    """One attempt to write that is made again and again; warns when it first fails.

    Args:
        what: what cannot be written, and by whom, as the beginning of a sentence.
        patience_s: how long to try.
        kept: what is still intact, and what to do about it, as the end of the sentence when patience is over.
    """

    def __init__(self, what: str, patience_s: float, kept: str) -> None:
        self._what, self._patience_s, self._kept = what, patience_s, kept
        self._since: float | None = None

    @property
    def has_begun(self) -> bool:
        """Whether it has failed at least once."""
        return self._since is not None

    def failed(self, error: StorageError) -> None:
        """It has failed once more.

        Raises:
            StorageError: patience is over.
        """
        if self._since is None:
            self._since = time.monotonic()
            text = f"{self._what} waits for a folder that can be written to, for {self._patience_s:g} s at most"
            warnings.warn(f"{text}: {error}", stacklevel=2)
        if time.monotonic() - self._since >= self._patience_s:
            text = f"{self._what} could not be written for {self._patience_s:g} s: {error}"
            raise StorageError(f"{text}; {self._kept}", error.errno) from error
