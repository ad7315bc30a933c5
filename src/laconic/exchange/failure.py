"""The first error of an exchange, kept until backward ends: DDP would make a RuntimeError of it.

Caller: `overlap.py`.
"""

from __future__ import annotations

import logging

from torch import Tensor

_log = logging.getLogger("laconic.exchange")


class Failure:
    """What went wrong first, if anything did; a bucket that was under way too fails because of the first."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def note(self, error: Exception) -> None:
        """Keep the first error."""
        if self._error is None:
            self._error = error
            _log.error("the exchange of gradients failed: %s: %s", type(error).__name__, error)

    def __bool__(self) -> bool:
        return self._error is not None

    def marked(self, buffer: Tensor) -> Tensor:
        """The buffer; of NaN after a failure: whoever steps all the same, steps nowhere unnoticed."""
        return buffer.fill_(float("nan")) if self else buffer

    def raise_first(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise self._error
