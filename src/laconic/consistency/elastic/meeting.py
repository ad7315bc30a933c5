"""The meeting place of a job: numbers for newcomers, the list of views, events, and every worker's progress.

Callers: `membership.py` and `line.py`; `laconic status` and the laboratory read it. The place (`places/`) must be one
that all workers reach; it is the only thing that has to survive every worker. It holds

    id-00000007            number 7 is taken
    view-00000012.json     the members of view 12, the coordinator first
    events.jsonl           who joined, left or was lost, when, at which step
    status-00000007.json   how far worker 7 is, every few seconds
    key                    beyond loopback: the job's key, made by the first worker
    admitted               the public keys of those who may come, one a line; missing: the shared key admits all
    finished.json          the training is over

Invariant: view n is written once. So of two workers that believe the other dead only one gets view n+1, and the other
finds that it is out: a zombie cannot form a group of its own. A place without the view that a worker has last seen
there, such as an unmounted share or an etcd that was emptied, has lost the job: to that worker it is away.
"""

from __future__ import annotations

import contextlib
import json
import logging
import re
import threading
import time
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from laconic.consistency.elastic.outage import RETRY_S
from laconic.consistency.elastic.places import open_place
from laconic.consistency.elastic.places.base import LIST
from laconic.errors import PayloadError, StorageError
from laconic.storage.json_text import parse_lines, read_lines, seal, unseal
from laconic.transports.zeromq_keys import new_key

READ_S = 0.25  # how often a thread looks for views at a place that is far away
LIST_S = 0.5  # how often the list of who may come is read, where that is quick
STATUS_S = 2.0  # how often a worker says how far it is
_log = logging.getLogger("laconic.consistency")
_ID = re.compile(r"id-(\d{8})")
_VIEW = re.compile(r"view-(\d{8})\.json")


@dataclass(frozen=True)
class View:
    """The members that train together, by seniority: the first is the coordinator, which commits the steps."""

    number: int  # from 1, one more than that of the view it replaces
    members: tuple[tuple[int, str], ...]  # (id, address) of each
    job: str  # what is trained, so that nobody joins with another model or other data
    begun: float  # when view 1 was made, in seconds since 1970
    why: str = ""  # who has come and gone since the view before, for logs

    @property
    def ids(self) -> tuple[int, ...]:
        """The members' numbers, the coordinator's first."""
        return tuple(member for member, _ in self.members)

    @property
    def coordinator(self) -> int:
        """The coordinator: the longest-standing member."""
        return self.members[0][0]

    def to_json(self) -> str:
        """As `parse` reads it."""
        said = {"number": self.number, "members": self.members, "job": self.job, "begun": self.begun, "why": self.why}
        return seal(said)

    @classmethod
    def parse(cls, text: str | bytes) -> View:
        """Read what `to_json` wrote; PayloadError for anything else.

        >>> View.parse(View(3, ((7, "a"), (9, "b")), "digits", 0.0).to_json()).coordinator
        7
        """
        try:
            data = unseal(text)
            members = tuple((int(member), str(address)) for member, address in data["members"])
            return cls(int(data["number"]), members, str(data["job"]), float(data["begun"]), str(data.get("why", "")))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            raise PayloadError(f"not a view: {error}") from None


class Meeting:
    """One worker's access to the meeting place of its job.

    What cannot be read or written raises StorageError, and may be tried again.

    Args:
        where: a folder, or an address; see `places.open_place`.
    """

    def __init__(self, where: str | Path) -> None:
        self._place = open_place(where)
        self.where = self._place.where
        self._last: View | None = None  # the newest that was read or written there, not what members have told
        self._has_lost = False
        self._reader: _Background | None = None
        self._listed: frozenset[str] | None = None
        self._listed_at = 0.0

    def check(self) -> None:
        """Raise StorageError if the place has lost the job; log when that begins, and when it is over."""
        last = self._last
        if last is None:
            return
        text, had_lost = self._place.read(_view_name(last.number)), self._has_lost
        with contextlib.suppress(PayloadError):  # a damaged view is not a lost one
            self._has_lost = text is None or View.parse(text) != last
        if self._has_lost:
            what = f"the meeting place {self.where} has lost the job: view {last.number} of it is not there"
            cure = "mount its folder, or bring back the files of `laconic meet` or the keys of etcd"
            error = StorageError(f"{what}; steps go on, and a change of members waits until it is back: {cure}")
            if not had_lost:
                _log.warning("%s", error)
            raise error
        if had_lost:
            _log.warning("the meeting place %s has view %d of the job again", self.where, last.number)

    def number(self) -> int:
        """A number that no other worker of this job has or had."""
        self.check()
        candidate = self._highest("id-", _ID) + 1
        while not self._create(f"id-{candidate:08d}", ""):
            candidate += 1
        return candidate

    def publish(self, view: View) -> bool:
        """Make a view the valid one; False when another of its number is there already."""
        self.check()
        name, text = _view_name(view.number), view.to_json()
        # Where the answer to an earlier try was lost, the view that is there is this one.
        is_ours = self._create(name, text) or self._place.read(name) == text.encode()
        self.check()  # it may have been emptied in between
        if is_ours:
            self._last = view
        return is_ours

    def newest(self, known: int = 0) -> View | None:
        """The newest view above number `known`; None where there is none."""
        number, text = known or self._highest("view-", _VIEW) - 1, None
        while (later := self._place.read(_view_name(number + 1))) is not None:
            number, text = number + 1, later
        if text is None:
            if not known:
                self.check()
            return None
        self.check()
        try:
            self._last = view = View.parse(text)
        except PayloadError as error:
            raise PayloadError(f"{_view_name(number)} in {self.where} is {error}") from error
        return view

    def seen(self, known: int) -> View | None:
        """As `newest`, without waiting: for a remote place, return what a thread read a moment ago."""
        if self._place.is_quick:
            return self.newest(known)
        view = self._background().view
        return view if view is not None and view.number > known else None

    def report(self, worker: int, status: dict[str, Any]) -> None:
        """Publish a worker's progress without waiting; skip it if it cannot be written."""
        self._background().status = (worker, status)

    def statuses(self) -> list[dict[str, Any]]:
        """The last reports of the newest view's members; members that have not reported are left out."""
        view = self.newest()
        texts = (self._place.read(_status_name(member)) for member in (view.ids if view else ()))
        return [status for text in texts if text is not None for status in parse_lines(text, unseal)]

    def key(self) -> bytes:
        """The job's key: made by the first worker, read by all others."""
        found = self._place.read("key")
        if found is None:
            self._place.create("key", new_key().decode())
            found = self._place.read("key")
        if found is None:
            raise StorageError(f"the key that was made in {self.where} is gone")
        return found

    def admitted(self) -> frozenset[str] | None:
        """The public keys of those who may come, as read a moment ago; None where the job has no such list."""
        if self._listed_at == 0.0 or (self._place.is_quick and time.monotonic() - self._listed_at > LIST_S):
            self.read_list()
        elif not self._place.is_quick:
            self._background()
        return self._listed

    def admits(self, public: str) -> bool:
        """Whether the owner of a public key is on the list."""
        return public in (self.admitted() or ())

    def read_list(self) -> None:
        """Read the list anew; what cannot be read stays as it was, but at the first time raises StorageError."""
        try:
            text = self._place.read(LIST)
            if text is None and self._listed is not None:
                self.check()  # a list that is lost with the job still counts
        except StorageError:
            if self._listed_at == 0.0:
                raise
            return
        self._listed_at = time.monotonic()
        lines = None if text is None else text.decode(errors="replace").splitlines()
        self._listed = None if lines is None else frozenset(line.split()[0] for line in lines if line.strip())

    def change_list(self, public: str, name: str | None) -> None:
        """Add a public key with a name to the list; None: take it off."""
        found = (self._place.read(LIST) or b"").decode().splitlines()
        kept = [line for line in found if line and line.split()[0] != public]
        lines = kept if name is None else [*kept, f"{public} {name}".strip()]
        self._place.replace(LIST, "".join(f"{line}\n" for line in lines))

    def finish(self, step: int) -> StorageError | None:
        """Say that the training is over; return the error if that cannot be written."""
        try:
            self._place.create("finished.json", json.dumps({"step": step}))
        except StorageError as error:
            return error
        return None

    def finish_within(self, patience_s: float, step: int) -> None:
        """Say that the training is over; try for `patience_s`, then warn."""
        ends = time.monotonic() + patience_s
        while (error := self.finish(step)) is not None:
            if time.monotonic() >= ends:
                warnings.warn(f"{error}; the training is over, and who comes now finds nobody", stacklevel=2)
                return
            time.sleep(RETRY_S)

    @property
    def finished(self) -> bool:
        """Whether the training is over."""
        if self._place.read("finished.json") is None:
            return False
        self.check()  # it may be another job's
        return True

    def record(self, events: Iterable[dict[str, Any]]) -> None:
        """Append events, one JSON object a line; a warning when they cannot be written."""
        lines = [seal(event) for event in events]
        if not lines:
            return
        try:
            self._place.append("events.jsonl", lines)
        except StorageError as error:
            warnings.warn(f"{error}; left out: {'; '.join(lines)}", stacklevel=2)

    def events(self) -> list[dict[str, Any]]:
        """What happened to the job, in order; see `read_events`."""
        return list(parse_lines(self._place.read("events.jsonl") or b"", unseal))

    def close(self) -> None:
        """Give up the place; safe to call twice."""
        if self._reader is not None:
            self._reader.stop()
        self._place.close()

    def _create(self, name: str, text: str) -> bool:
        if self._place.create(name, text):
            return True
        if self._place.read(name) is None:
            raise StorageError(f"{self.where} is no meeting place: it refuses {name} as taken, and does not have it")
        return False

    def _highest(self, prefix: str, pattern: re.Pattern[str]) -> int:
        """The highest number among the texts with this prefix, 0 if there are none."""
        return max((int(name[1]) for name in map(pattern.fullmatch, self._place.names(prefix)) if name), default=0)

    def _background(self) -> _Background:
        if self._reader is None:
            self._reader = _Background(self)
            self._reader.start()
        return self._reader

    def write_status(self, worker: int, status: dict[str, Any]) -> None:
        """Write the status that `report` was given; a place that has lost the job is noticed by this."""
        self.check()
        self._place.replace(_status_name(worker), seal({**status, "at": time.time()}) + "\n")

    @property
    def is_quick(self) -> bool:
        """Whether reading the place takes no longer than looking into a file."""
        return self._place.is_quick


class _Background(threading.Thread):
    """Reads views and writes one worker's status on a thread, so that training never waits for a remote place."""

    def __init__(self, meeting: Meeting) -> None:
        super().__init__(name="laconic-meeting", daemon=True)
        self.view: View | None = None
        self.status: tuple[int, dict[str, Any]] | None = None
        self._meeting, self._is_over = meeting, threading.Event()
        self._written_at = 0.0

    def run(self) -> None:
        while not self._is_over.wait(READ_S):
            with contextlib.suppress(StorageError, PayloadError):  # it may be away: members talk to each other
                if not self._meeting.is_quick:
                    self.view = self._meeting.newest(self.view.number if self.view else 0) or self.view
                    self._meeting.read_list()
            if time.monotonic() - self._written_at > STATUS_S:
                self._write()
        self._write()  # where it ended

    def _write(self) -> None:
        status, self.status = self.status, None
        if status is not None:
            self._written_at = time.monotonic()
            with contextlib.suppress(StorageError):
                self._meeting.write_status(*status)

    def stop(self) -> None:
        self._is_over.set()
        self.join()


def _view_name(number: int) -> str:
    return f"view-{number:08d}.json"


def _status_name(worker: int) -> str:
    return f"status-{worker:08d}.json"


def read_events(folder: str | Path) -> list[dict[str, Any]]:
    """What happened to a job, in order: seconds, step, rank, what, lost, view. A damaged line is left out."""
    return list(read_lines(Path(folder) / "events.jsonl", unseal))


def event(view: View, step: int, member: int, what: str, lost: int = 0) -> dict[str, Any]:
    """One event; `rank` is the worker's number, `lost` the steps that have to be done again."""
    seconds = round(time.time() - view.begun, 4)
    return {"seconds": seconds, "step": step, "rank": member, "what": what, "lost": lost, "view": view.number}
