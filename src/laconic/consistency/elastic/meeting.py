"""The folder where workers meet: numbers for newcomers, the list of views, and what happened.

Callers: `group.py`. The folder must be one that all workers share (a disk on one machine, NFS between several); it is
the only thing that has to survive every worker. It holds

    id-00000007            number 7 is taken
    view-00000012.json     the members of view 12, the coordinator first
    events.jsonl           who joined, left or was lost, when, at which step
    key                    beyond loopback: the job's key, made by whoever came first
    finished.json          the training is over

Invariant: view n is written once, by a hard link that fails when it is there. So of two workers that believe the other
dead only one gets view n+1, and the other finds that it is out: a zombie cannot form a group of its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.errors import BadInput, PayloadError, StorageError
from laconic.storage.files import append, create, folder_of
from laconic.storage.json_text import read_lines, seal, unseal
from laconic.transports.zeromq_keys import new_key

_ID = re.compile(r"id-(\d{8})")
_VIEW = re.compile(r"view-(\d{8})\.json")


@dataclass(frozen=True)
class View:
    """Who trains together, by seniority: the first is the coordinator, who commits the steps."""

    number: int  # from 1, one more than that of the view it replaces
    members: tuple[tuple[int, str], ...]  # (id, address) of each
    job: str  # what is trained, so that nobody joins with another model or other data
    begun: float  # when view 1 was made, in seconds since 1970

    @property
    def ids(self) -> tuple[int, ...]:
        """The members' numbers, the coordinator's first."""
        return tuple(member for member, _ in self.members)

    @property
    def coordinator(self) -> int:
        """Who commits the steps: the longest-standing member."""
        return self.members[0][0]

    def to_json(self) -> str:
        """As `parse` reads it."""
        return seal({"number": self.number, "members": self.members, "job": self.job, "begun": self.begun})

    @classmethod
    def parse(cls, text: str | bytes) -> View:
        """Read what `to_json` wrote; PayloadError for anything else.

        >>> View.parse(View(3, ((7, "a"), (9, "b")), "digits", 0.0).to_json()).coordinator
        7
        """
        try:
            data = unseal(text)
            members = tuple((int(member), str(address)) for member, address in data["members"])
            return cls(int(data["number"]), members, str(data["job"]), float(data["begun"]))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise PayloadError(f"not a view: {error}") from None


class Meeting:
    """The folder of one job; made when it is not there, readable by its owner only.

    What cannot be read or written raises StorageError.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = folder_of(folder)
        try:
            self.folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        except OSError as error:
            raise BadInput(f"workers cannot meet in {folder}: {error.strerror}") from None

    def number(self) -> int:
        """A number that no other worker of this job has or had."""
        candidate = self._highest(_ID) + 1
        while not create(self.folder / f"id-{candidate:08d}", ""):
            candidate += 1
        return candidate

    def publish(self, view: View) -> bool:
        """Make a view the valid one; False when another of its number is there already."""
        return create(self._path(view.number), view.to_json())

    def newest(self, known: int = 0) -> View | None:
        """The newest view above number `known`; None where there is none."""
        number = known or self._highest(_VIEW)
        with self._reading():
            while known and self._path(number + 1).exists():
                number += 1
            if number <= known:
                return None
            text = self._path(number).read_bytes()
        try:
            return View.parse(text)
        except PayloadError as error:
            raise PayloadError(f"{self._path(number)} is {error}") from error

    def _highest(self, pattern: re.Pattern[str]) -> int:
        """The highest number of files that are called so, 0 where there are none."""
        with self._reading():
            return max((int(name[1]) for name in map(pattern.fullmatch, os.listdir(self.folder)) if name), default=0)

    @contextlib.contextmanager
    def _reading(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            text = f"{error.filename or self.folder} cannot be read: {error.strerror}"
            raise StorageError(text, error.errno) from error

    def key(self) -> bytes:
        """The job's key: made by the first who asks, read by all others."""
        path = self.folder / "key"
        with self._reading():
            if path.exists():
                return path.read_bytes()
        create(path, new_key().decode())
        with self._reading():
            return path.read_bytes()

    def finish(self, step: int) -> None:
        """Say that the training is over; a warning when that cannot be written."""
        try:
            create(self.folder / "finished.json", json.dumps({"step": step}))
        except StorageError as error:
            warnings.warn(f"{error}; the training is over, and who comes now finds nobody", stacklevel=2)

    @property
    def finished(self) -> bool:
        """Whether the training is over."""
        with self._reading():
            return (self.folder / "finished.json").exists()

    def record(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events, one JSON object a line; a warning when they cannot be written."""
        lines = [seal(event) for event in events]
        try:
            append(self.folder / "events.jsonl", lines, mode=0o600)
        except StorageError as error:
            warnings.warn(f"{error}; left out: {'; '.join(lines)}", stacklevel=2)

    def _path(self, number: int) -> Path:
        return self.folder / f"view-{number:08d}.json"


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """What happened to a job, in order: seconds, step, rank, what, lost, view. A damaged line is left out."""
    return list(read_lines(Path(folder) / "events.jsonl", unseal))


def event(view: View, step: int, member: int, what: str, lost: int = 0) -> dict[str, Any]:
    """One event; `rank` is the worker's number, `lost` the steps that have to be done again."""
    seconds = round(time.time() - view.begun, 4)
    return {"seconds": seconds, "step": step, "rank": member, "what": what, "lost": lost, "view": view.number}
