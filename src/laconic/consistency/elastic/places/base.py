"""A meeting place: a small store of named texts that every worker of a job can reach.

Caller: `elastic/meeting.py`, which keeps numbers, views and events in it. A place is a file of this package with
`@PLACES.register(SCHEME)`; the conformance suite (`tests/consistency/elastic/test_places.py`) picks it up.

Invariant: of several workers that `create` the same name, one gets True. All else follows from that.
"""

from __future__ import annotations

import re
import threading
from collections import deque
from collections.abc import Iterable
from pathlib import Path
from typing import ClassVar, Protocol

from laconic.errors import BadInput
from laconic.registry import Registry

FOLDER = "folder"
LIST = "admitted"  # the name of the list of who may come, which `laconic meet` lets nobody write from afar
JOB = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SCHEME = re.compile(r"([a-z][a-z0-9+]*)://(.*)")
_BARE = re.compile(r"[^/\s]+:\d+(/.*)?")  # an address whose scheme was forgotten


class MeetingPlace(Protocol):
    """Named texts. What cannot be read or written raises StorageError, and may be tried again.

    Attributes:
        where: the place as its user named it.
        is_quick: reading takes no longer than looking into a file; else a thread reads ahead.
    """

    where: str
    is_quick: ClassVar[bool]

    def create(self, name: str, text: str) -> bool:
        """Write a text under a name that nobody has used; False where somebody has."""

    def replace(self, name: str, text: str) -> None:
        """Write a text in place of the one that may be there."""

    def append(self, name: str, lines: Iterable[str]) -> None:
        """Add lines to a text; those of several workers do not mix."""

    def read(self, name: str) -> bytes | None:
        """The text of that name; None where there is none."""

    def names(self, prefix: str = "") -> list[str]:
        """The names that begin so, in no order; of very many, the last by the alphabet."""

    def close(self) -> None:
        """Release what holds the place open; safe to call twice."""


class Turns:
    """A lock that is taken in the order of asking.

    Two threads of a worker use one connection, of which one asks without a pause: a plain lock, which that thread takes
    again at once, kept the other out for minutes where an answer takes a fifth of a second.
    """

    def __init__(self) -> None:
        self._inner, self._is_taken = threading.Lock(), False
        self._waiting: deque[threading.Lock] = deque()

    def __enter__(self) -> None:
        with self._inner:
            if not self._is_taken:
                self._is_taken = True
                return
            turn = threading.Lock()
            turn.acquire()
            self._waiting.append(turn)
        turn.acquire()  # released by the one before

    def __exit__(self, *_: object) -> None:
        with self._inner:
            if self._waiting:
                self._waiting.popleft().release()
            else:
                self._is_taken = False


PLACES: Registry[type[MeetingPlace]] = Registry("meeting place", "laconic.consistency.elastic.places")


def open_place(where: str | Path) -> MeetingPlace:
    """The place that a user named: a folder, or an address such as `tcp://host:port/job` or `etcd://host:2379/job`.

    Raises:
        BadInput, UnknownName: it is no place, or of a kind that there is not.
    """
    found = _SCHEME.fullmatch(where) if isinstance(where, str) else None
    if isinstance(where, str) and _BARE.fullmatch(where):
        raise BadInput(f"'{where}' lacks its kind: write tcp://{where} for a `laconic meet`, or ./{where} for a folder")
    return PLACES.get(found[1] if found else FOLDER)(where)  # type: ignore[call-arg]


def split_address(where: str, example: str) -> tuple[str, str]:
    """What stands between `://` and the job's name, and that name, "job" where none is given.

    >>> split_address("tcp://10.0.0.1:5000/digits", "")
    ('10.0.0.1:5000', 'digits')
    """
    scheme, _, rest = where.partition("://")
    server, _, job = rest.partition("/")
    job = job.strip("/") or "job"
    if not server or not JOB.fullmatch(job):
        shown = f"{scheme}://{rest.rpartition('@')[2]}"  # without a password
        raise BadInput(f"'{shown}' is no meeting place; one looks like {example}")
    return server, job


def split_port(server: str, default: int | None, where: str) -> tuple[str, int]:
    """Host and port of `host:port`, `[v6]:port` or, with a default, `host`.

    >>> split_port("[::1]:5000", None, ""), split_port("etcd.lan", 2379, "")
    (('::1', 5000), ('etcd.lan', 2379))
    """
    host, colon, port = server.rpartition(":")
    if not colon or port.endswith("]"):
        host, port = server, "" if default is None else str(default)
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise BadInput(f"'{where}' needs a host and a port, such as 192.0.2.1:5000")
    return host.strip("[]"), int(port)
