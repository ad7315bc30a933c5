"""A function of this process that a rank in another process can call, such as to ask whether to stop.

Callers: `workers.py`, for evaluations of a training; a search, for what its trials report.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import Any

from laconic.transports.launcher import process_context

LAST_S = 60.0  # how long the last answer to ranks that are gone is waited for


@dataclass(frozen=True)
class RelayedCall:
    """What the rank calls; one rank, and one call at a time."""

    pipe: Connection

    def __call__(self, *arguments: Any) -> bool:
        self.pipe.send(arguments)
        return bool(self.pipe.recv())


class Relay:
    """Calls `answer` in a thread for each question of a rank, while the block lasts; the rank gets the result.

    After an error in `answer` every further answer is True, which asks to stop, and the error is raised at the end of
    the block.
    """

    def __init__(self, answer: Callable[..., bool]) -> None:
        self._answer = answer
        self._error: Exception | None = None
        self._ours, self._theirs = process_context().Pipe()
        self._thread = threading.Thread(target=self._serve, name="laconic-reports", daemon=True)

    def __enter__(self) -> RelayedCall:
        self._thread.start()
        return RelayedCall(self._theirs)

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        self._theirs.close()
        self._thread.join(LAST_S)  # it may still wait for an answer, which is not to be taken for a later one's
        if self._error is not None and failure is None:
            raise self._error

    def _serve(self) -> None:
        with contextlib.suppress(EOFError, OSError):
            while True:
                self._ours.send(self._answered(self._ours.recv()))

    def _answered(self, arguments: tuple[Any, ...]) -> bool:
        try:
            return self._error is not None or self._answer(*arguments)
        except Exception as error:
            self._error = error
            return True
