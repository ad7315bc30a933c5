"""Where a search is kept: an Optuna storage, by default a journal in the run's folder.

    (nothing)                           runs/<id>/journal.log
    journal:///shared/search.log        a journal elsewhere, such as on a file system that several machines share
    postgresql://user@host/database     a database, for many machines (also any other that SQLAlchemy opens)
    grpc://host:13000                   Optuna's proxy before a database

Callers: the loop. Several processes may work on one search: each trial has an owner, and a trial whose owner is gone is
taken back. Invariants: a trial is written before it begins, and its end before the next one is asked for; a trial that
has ended never changes; who is told of an end twice keeps the first.
"""

from __future__ import annotations

import contextlib
import fcntl
import itertools
import json
import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

from laconic.errors import BadInput, MissingExtra, StorageError
from laconic.search.history import History, Proposal, Seen, State
from laconic.search.mirror import STATES, frozen
from laconic.search.space import Space

T = TypeVar("T")
LEASE_S = 60.0  # an owner on another machine that has been silent for so long is gone
BEAT_S = 10.0
REACHED_S = 30.0  # how long a proxy is waited for at the start
AGAIN_S = 60.0  # how long a database that went away is waited for
_NAMES: dict[Any, State] = {
    STATES["running"]: "running", STATES["done"]: "done", STATES["stopped"]: "stopped", STATES["failed"]: "failed",
}  # fmt: skip


class _Lock:
    """A lock that the kernel gives back when its holder dies, unlike Optuna's own, which is a file that stays."""

    def __init__(self, path: str) -> None:
        self._path, self._held = f"{path}.lock", -1
        self._threads = threading.Lock()

    def acquire(self) -> bool:
        self._threads.acquire()
        try:
            self._held = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o644)
        except BaseException:
            self._threads.release()
            raise
        fcntl.flock(self._held, fcntl.LOCK_EX)
        return True

    def release(self) -> None:
        os.close(self._held)
        self._threads.release()


def open_storage(url: str) -> Any:
    """The storage of an address.

    Raises:
        BadInput: it cannot be reached, or is no storage; the sentence says why.
        MissingExtra: a package is not installed.
    """
    from optuna.storages import GrpcStorageProxy, RDBStorage
    from optuna.storages.journal import JournalFileBackend

    kind, colon, rest = url.partition("://")
    try:
        if kind == "journal" or not colon:
            path = str(Path(rest if colon else url).absolute())
            Path(path).parent.mkdir(parents=True, exist_ok=True)
            lock = _Lock(path)
            _drop_torn_line(path, lock)
            return _journal(JournalFileBackend(path, lock_obj=lock))  # type: ignore[arg-type]
        if kind == "grpc":
            host, _, port = rest.partition(":")
            proxy = GrpcStorageProxy(host=host, port=int(port or 13000))
            proxy.wait_server_ready(timeout=REACHED_S)
            return proxy
        # named, since which driver stands behind the bare word depends on SQLAlchemy's version
        full = f"postgresql+psycopg://{rest}" if kind == "postgresql" else url
        return RDBStorage(full, engine_kwargs={"pool_pre_ping": True})
    except ImportError as error:
        raise MissingExtra(f"the driver of {kind}://", "search") from error
    except Exception as error:  # each driver has its own
        text = str(error).strip().splitlines()
        raise BadInput(f"the storage {url} cannot be reached: {text[0] if text else type(error).__name__}") from error


def _journal(backend: Any) -> Any:
    from optuna.storages import JournalStorage

    return JournalStorage(backend)


def _drop_torn_line(path: str, lock: _Lock) -> None:
    """Cut off what a killed process left of a line: whatever is appended to it could not be read."""
    lock.acquire()
    try:
        with open(path, "ab+") as file:
            size = file.seek(0, os.SEEK_END)
            while size:
                start = max(0, size - 65536)
                file.seek(start)
                newline = file.read(size - start).rfind(b"\n")
                if newline >= 0:
                    file.truncate(start + newline + 1)
                    return
                size = start
            file.truncate(0)
    finally:
        lock.release()


class Ledger:
    """One search in a storage.

    Args:
        url: see above.
        name: the search's, which those who work on it share.
        space: what is searched.
        sign: 1 to maximise, -1 to minimise: a value is sign × score.
    """

    def __init__(self, url: str, name: str, space: Space, sign: float) -> None:
        from optuna.exceptions import DuplicatedStudyError
        from optuna.study import StudyDirection

        self.url, self.space, self.sign = url, space, sign
        self.owner = f"{socket.gethostname()}:{os.getpid()}:{_started(os.getpid())}"
        self.storage = open_storage(url)
        direction = StudyDirection.MAXIMIZE if sign > 0 else StudyDirection.MINIMIZE
        with contextlib.suppress(DuplicatedStudyError):
            self.storage.create_new_study([direction], name)
        self._study = self._again(lambda: self.storage.get_study_id_from_name(name))
        self._ids: dict[int, int] = {}
        self._beaten_s = -BEAT_S

    def load(self, history: History) -> None:
        """Take over what others, or an earlier start, have added."""
        for trial in self._again(lambda: self.storage.get_all_trials(self._study, deepcopy=False)):
            self._ids[trial.number] = trial._trial_id
            known = history.trials.get(trial.number)
            if known is None or (known.state == "running" and (trial.state.is_finished() or known.owner != self.owner)):
                history.put(self._seen(trial))

    def begin(self, proposal: Proposal, attempts: int = 1) -> Seen:
        """Write a new trial that is now under way."""
        kept = {"owner": self.owner, "parent": proposal.parent, "notes": json.dumps(dict(proposal.notes)),
                "attempts": attempts, "token": secrets.token_hex(8)}  # fmt: skip
        made = frozen(Seen(-1, proposal), self.space, attributes=kept)
        tries = itertools.count()

        def write() -> int:
            """The new trial; when the connection broke the first time it may be there already."""
            if next(tries):
                for trial in self.storage.get_all_trials(self._study, deepcopy=False):
                    if trial.user_attrs.get("token") == kept["token"]:
                        return int(trial._trial_id)
            return int(self.storage.create_new_trial(self._study, made))

        identity = self._again(write)
        number = self._again(lambda: self.storage.get_trial_number_from_id(identity))
        self._ids[number] = identity
        return Seen(number, proposal, owner=self.owner, attempts=attempts)

    def report(self, trial: Seen, step: int, score: float) -> Seen:
        """Write a report of a trial under way; one that has ended, since others took it back, stays as it is."""
        from optuna.exceptions import UpdateFinishedTrialError

        with contextlib.suppress(UpdateFinishedTrialError):
            identity = self._ids[trial.number]
            self._again(lambda: self.storage.set_trial_intermediate_value(identity, step, self.sign * score))
        return replace(trial, reports={**trial.reports, step: score})

    def end(self, trial: Seen) -> Seen:
        """Write how a trial ended; one that has ended already stays as it is."""
        from optuna.exceptions import UpdateFinishedTrialError

        identity = self._ids[trial.number]
        value = None if trial.score is None else [self.sign * trial.score]

        def write() -> None:
            with contextlib.suppress(UpdateFinishedTrialError):
                for key in ("seconds", "samples", "why"):
                    if given := getattr(trial, key):
                        self.storage.set_trial_user_attr(identity, key, given)
                self.storage.set_trial_state_values(identity, STATES[trial.state], value)

        self._again(write)
        return trial

    def abandoned(self, history: History) -> list[Seen]:
        """The trials under way whose owner is gone."""
        others = [trial for trial in history.running if trial.owner != self.owner]
        if not others:
            return []
        beats = self._again(lambda: self.storage.get_study_user_attrs(self._study))
        return [trial for trial in others if not _lives(trial.owner, beats.get(f"beat {trial.owner}", 0.0))]

    def beat(self) -> None:
        """Say that this process is alive, every few seconds; matters where several machines share a storage."""
        if "://" not in self.url or time.monotonic() < self._beaten_s + BEAT_S:
            return
        self._beaten_s = time.monotonic()
        self._again(lambda: self.storage.set_study_user_attr(self._study, f"beat {self.owner}", time.time()))

    @contextlib.contextmanager
    def beating(self) -> Iterator[None]:
        """Beat while the block lasts, also while a trial is evaluated in this process and the loop waits for it."""
        over = threading.Event()

        def beats() -> None:
            while not over.wait(BEAT_S / 2):
                with contextlib.suppress(Exception):  # the loop meets the same error, and says so
                    self.beat()

        thread = threading.Thread(target=beats, daemon=True)
        if "://" in self.url:
            thread.start()
        try:
            yield
        finally:
            over.set()

    def close(self) -> None:
        """Give connections back."""
        with contextlib.suppress(Exception):
            self.storage.remove_session()

    def _seen(self, trial: Any) -> Seen:
        kept, state = trial.user_attrs, _NAMES.get(trial.state, "running")
        score = None if trial.value is None or state == "failed" else self.sign * trial.value
        reports = {step: self.sign * value for step, value in sorted(trial.intermediate_values.items())}
        proposal = Proposal(dict(trial.params), kept.get("parent"), json.loads(kept.get("notes", "{}")))
        return Seen(trial.number, proposal, state, score, reports, kept.get("seconds", 0.0), kept.get("why"),
                    kept.get("owner", ""), kept.get("attempts", 1), kept.get("samples", 0))  # fmt: skip

    def _again(self, work: Callable[[], T]) -> T:
        """Do it, again and again while a database is away; each of our writes can be made twice."""
        begun, pause = time.monotonic(), 0.05
        while True:
            try:
                return work()
            except OSError as error:
                raise StorageError(f"the storage {self.url} cannot be written: {error.strerror or error}") from error
            except Exception as error:
                if not _is_away(error):
                    raise
                if time.monotonic() > begun + AGAIN_S:
                    raise BadInput(f"the storage {self.url} has been away for {AGAIN_S:g} s; when it is back, "
                                   "resume the search") from error  # fmt: skip
            self.close()  # what was under way on the broken connection is rolled back with its session
            time.sleep(pause)
            pause = min(2 * pause, 2.0)


_AWAY = {"OperationalError", "InterfaceError", "DBAPIError", "PendingRollbackError"}  # SQLAlchemy's


def _is_away(error: Exception) -> bool:
    """Whether an error is about the connection: one of SQLAlchemy's, or gRPC's UNAVAILABLE."""
    names = {kind.__name__ for kind in type(error).__mro__}
    cause = error.__cause__
    if names & _AWAY or "UNAVAILABLE" in str(error):
        return True
    return isinstance(cause, Exception) and _is_away(cause)


def _started(process: int) -> str:
    """When a process began, in the kernel's ticks, since numbers of processes are used again; "" where it is gone."""
    try:
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        return ""


def _lives(owner: str, beat: float) -> bool:
    host, _, rest = owner.partition(":")
    process, _, started = rest.partition(":")
    if host == socket.gethostname() and process.isdigit():
        return bool(started) and _started(int(process)) == started
    return time.time() < beat + LEASE_S


@contextlib.contextmanager
def opened(url: str, name: str, space: Space, sign: float) -> Iterator[Ledger]:
    """A ledger that is closed at the end of the block."""
    ledger = Ledger(url, name, space, sign)
    try:
        with ledger.beating():
            yield ledger
    finally:
        ledger.close()
