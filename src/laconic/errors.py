"""Every error Laconic raises on purpose, so that one `except LaconicError` catches them all.

    LaconicError
    ├── BadInput (ValueError)             a user's value cannot be used; the sentence says what can
    │   ├── BudgetMissed                  no shrunk model is within the budget; has .nearest
    │   ├── UnknownName                   no such codec, algorithm, engine…; lists the valid ones
    │   └── RecordError                   a run's record is missing, corrupt, cut off or of another format
    ├── MissingExtra (ImportError)        an optional package is not installed; names the extra
    ├── PayloadError (ValueError)         bytes from the wire or a file are truncated, oversized or corrupt
    ├── CheckpointError (RuntimeError)    there are checkpoints, and none that all workers can go on from
    ├── StorageError (OSError)            a file cannot be written (a full disk) or read; says what is still intact
    ├── NonFiniteError (ValueError)       NaN or infinity where a codec's policy is to refuse it
    ├── DeviceMemoryError (MemoryError)   memory on or for a device cannot be had; nothing was sent
    ├── ScheduleError (ValueError)        a schedule is not a correct collective
    ├── ProfileError (ValueError)         a link profile cannot be read
    ├── StalenessError (RuntimeError)     a worker computed with weights older than its bound allows
    └── TransportError (RuntimeError)     something failed between ranks; has .rank, .peer, .round
        ├── PeerLost                      a peer died, stopped or was cut off
        ├── CollectiveTimeout (TimeoutError)  nobody is known dead, but the wait ran out
        ├── Mismatch                      ranks called different collectives, sizes or dtypes, or train different models
        └── NotAuthorised                 no key where one is needed, or a wrong one
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches


class LaconicError(Exception):
    """Base of every error raised by Laconic.

    >>> import laconic
    >>> try:
    ...     laconic.codec("dynamic9")
    ... except laconic.errors.LaconicError as error:
    ...     str(error).split(";")[0]
    "unknown codec 'dynamic9'"
    """


def near(name: str, valid: Iterable[str]) -> str:
    """What to add to a sentence about a name that is missing: the nearest of the valid ones, if any is near.

    >>> near("nett", ["net", "tree"])
    "; did you mean 'net'?"
    >>> near("x", ["net", "tree"])
    ''
    """
    close = get_close_matches(name, sorted(valid), n=1)
    return f"; did you mean '{close[0]}'?" if close else ""


class BadInput(LaconicError, ValueError):
    """A value given by the user cannot be used."""


class BudgetMissed(BadInput):
    """Nothing that was tried is within the budget; `nearest` is what came nearest."""

    def __init__(self, message: str, nearest: object = None) -> None:
        super().__init__(message)
        self.nearest = nearest


class UnknownName(BadInput):
    """A name is not registered; the message lists the ones that are.

    >>> str(UnknownName("algorithm", "rign", ["ring", "tree"]))
    "unknown algorithm 'rign'; did you mean 'ring'? The valid ones: ring, tree"
    """

    def __init__(self, what: str, name: str, valid: Iterable[str]) -> None:
        names = sorted(valid)
        hint = near(str(name), names)
        super().__init__(f"unknown {what} '{name}'{hint}{' The' if hint else '; the'} valid ones: {', '.join(names)}")
        self.name = name
        self.valid = names


class RecordError(BadInput):
    """A run's record is missing, corrupt, cut off or of another format."""


class MissingExtra(LaconicError, ImportError):
    """An optional package is missing.

    >>> str(MissingExtra("mpi4py", "mpi"))
    "mpi4py is not installed; run: pip install 'laconic[mpi]'"
    """

    def __init__(self, package: str, extra: str, distribution: str = "laconic") -> None:
        super().__init__(f"{package} is not installed; run: pip install '{distribution}[{extra}]'")


class PayloadError(LaconicError, ValueError):
    """A payload is truncated, oversized, corrupt, or not for this codec.

    Attributes:
        peer: the rank that sent it, where that is known.
    """

    peer: int | None = None


class CheckpointError(LaconicError, RuntimeError):
    """There are checkpoints, and none of them is whole and fits this job."""


class StorageError(LaconicError, OSError):
    """A file cannot be written: the disk is full or read-only, or a right is missing; or cannot be read.

    The sentence names the file and says what is still intact; `errno` is the system's number, where it gave one.
    """

    def __init__(self, message: str, errno: int | None = None) -> None:
        super().__init__(message)
        self.errno = errno


class NonFiniteError(LaconicError, ValueError):
    """The input holds NaN or infinity and the codec's policy is to refuse it."""


class DeviceMemoryError(LaconicError, MemoryError):
    """Memory that an exchange needs on, or for, a device cannot be had; nothing was sent."""


class ScheduleError(LaconicError, ValueError):
    """A schedule is not a correct, deadlock-free collective."""


class ProfileError(LaconicError, ValueError):
    """A link profile is missing, corrupt or from another version."""


class StalenessError(LaconicError, RuntimeError):
    """A worker computed with weights older than the staleness bound allows."""


class TransportError(LaconicError, RuntimeError):
    """A failure between ranks.

    Attributes:
        rank: the rank that reports it.
        peer: the rank it is about, or None.
        round: the round of the schedule in which it was noticed, or None.
    """

    def __init__(self, message: str, *, rank: int, peer: int | None = None, round: int | None = None) -> None:
        super().__init__(message)
        self.rank = rank
        self.peer = peer
        self.round = round


class PeerLost(TransportError):
    """A peer died, stopped answering, or was cut off."""


class CollectiveTimeout(TransportError, TimeoutError):
    """A wait ran out although every peer seems alive."""


class Mismatch(TransportError):
    """Ranks disagree on the collective they are in (kind, algorithm, numel, dtype), or on what they train and how."""


class NotAuthorised(TransportError):
    """A key is missing where one is required, or a peer does not hold the job's key."""
