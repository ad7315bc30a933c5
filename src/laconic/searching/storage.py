"""Where a search is kept: an Optuna study in a storage, by default a journal in the run's folder.

    (nothing)                           runs/<id>/journal.log
    journal:///shared/search.log        a journal elsewhere, such as on a file system that several machines share
    postgresql://user@host/database     a database, for many machines (also any other that SQLAlchemy opens)
    grpc://host:13000                   Optuna's proxy before a database

Callers: `laconic.search`. Invariants: a call that a broken connection interrupted is retried, and writes nothing twice;
a line of a journal is complete or absent, even if its writer was killed.
"""

from __future__ import annotations

import contextlib
import fcntl
import functools
import json
import os
import secrets
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, BinaryIO, TypeVar, cast

from laconic.errors import BadInput, LaconicError, MissingExtra, RecordError, StorageError

try:
    import optuna
    from optuna.exceptions import ExperimentalWarning
    from optuna.storages import BaseStorage, GrpcStorageProxy, JournalStorage, RDBStorage, get_storage
    from optuna.storages.journal import BaseJournalBackend
    from optuna.study import Study, StudyDirection
    from optuna.trial import FrozenTrial
except ImportError as error:
    raise MissingExtra("optuna", "search") from error

T = TypeVar("T")
REACHED_S = 30.0  # how long a proxy is waited for at the start
CURE = "put a copy of it back, or search in another folder"
AGAIN_S = 60.0  # how long a database that went away is waited for


@contextlib.contextmanager
def opened_study(url: str, name: str, maximize: bool) -> Iterator[Study]:
    """The study of that name in a storage, made where it is not there; connections are given back at the end.

    Raises:
        BadInput: the storage cannot be reached, or its study of that name looks into the other direction.
        RecordError: it is a damaged journal.
        MissingExtra: a package is not installed.
    """
    before, direction = optuna.logging.get_verbosity(), StudyDirection.MAXIMIZE if maximize else StudyDirection.MINIMIZE
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage = open_storage(url)
        try:
            study = optuna.create_study(storage=storage, study_name=name, direction=direction, load_if_exists=True)
            if study.direction != direction:
                asked = direction.name.lower()
                raise BadInput(f"{url} holds a search '{name}' that does not {asked}: name another folder")
            yield study
        finally:
            with contextlib.suppress(Exception):
                storage.remove_session()
    finally:
        optuna.logging.set_verbosity(before)


def open_storage(url: str) -> BaseStorage:
    """The storage of an address.

    Raises:
        BadInput: it cannot be reached, or is no storage; the sentence says why.
        RecordError: it is a damaged journal.
        MissingExtra: a package is not installed.
    """
    kind, colon, rest = url.partition("://")
    try:
        if kind == "journal" or not colon:
            return _patient(url, _journal(Path(rest if colon else url).absolute()))
        if kind == "grpc":
            host, _, port = rest.partition(":")
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", ExperimentalWarning)
                proxy = GrpcStorageProxy(host=host, port=int(port or 13000))
            proxy.wait_server_ready(timeout=REACHED_S)
            return _patient(url, proxy)
        # named, since which driver stands behind the bare word depends on SQLAlchemy's version
        full = f"postgresql+psycopg://{rest}" if kind == "postgresql" else url
        return _patient(url, get_storage(RDBStorage(full, engine_kwargs={"pool_pre_ping": True})))
    except LaconicError:
        raise
    except ImportError as error:
        raise MissingExtra(f"the driver of {kind}://", "search") from error
    except Exception as error:  # each driver has its own
        text = str(error).strip().splitlines()
        raise BadInput(f"the storage {url} cannot be reached: {text[0] if text else type(error).__name__}") from error


def _journal(path: Path) -> JournalStorage:
    path.parent.mkdir(parents=True, exist_ok=True)
    file = JournalFile(path)
    try:
        return JournalStorage(file)
    except (LookupError, TypeError, ValueError, AttributeError, AssertionError) as error:
        if isinstance(error, LaconicError):
            raise
        raise file.damaged(file.lines, f"{type(error).__name__}: {error}") from error


class JournalFile(BaseJournalBackend):
    """The lines of a journal, for Optuna's storage of journals.

    The kernel frees its lock when the holder dies, unlike Optuna's own, which is a file that stays.
    A partial line of a killed process is cut off before the next one is written.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._threads = path, threading.Lock()
        self._ends = [0]  # of each line that was read, in bytes
        with self._locked(), open(path, "ab+") as file:
            _drop_torn_line(file)
            self._identity = _identity(file)

    def read_logs(self, log_number_from: int) -> Iterator[dict[str, Any]]:
        """The lines from one on, as far as they are whole.

        Raises:
            RecordError: one is damaged.
            StorageError: the file is gone, or another one.
        """
        with self._same_file("rb") as file:
            del self._ends[log_number_from + 1 :]
            file.seek(self._ends[-1])
            for line in file:
                if not line.endswith(b"\n"):  # it is being written
                    return
                try:
                    log = json.loads(line)
                except (ValueError, RecursionError) as error:
                    raise self.damaged(self.lines + 1, str(error)) from error
                if not isinstance(log, dict) or not {"op_code", "worker_id"} <= log.keys():
                    raise self.damaged(self.lines + 1, "no operation of a study")
                self._ends.append(self._ends[-1] + len(line))
                yield log

    def append_logs(self, logs: list[dict[str, Any]]) -> None:
        """Write lines, all of them or none.

        Raises:
            StorageError: the file is gone, or another one.
        """
        text = "".join(json.dumps(log, separators=(",", ":")) + "\n" for log in logs)
        with self._locked(), self._same_file("rb+") as file:
            _drop_torn_line(file)
            file.seek(0, os.SEEK_END)
            file.write(text.encode())
            file.flush()
            os.fsync(file.fileno())

    @property
    def lines(self) -> int:
        """How many were read."""
        return len(self._ends) - 1

    def damaged(self, line: int, why: str) -> RecordError:
        """What to raise about a line."""
        return RecordError(f"the journal {self._path} is damaged in line {line} ({why}): {CURE}")

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock, in this process and among all that use the file."""
        with self._threads:
            held = os.open(f"{self._path}.lock", os.O_CREAT | os.O_RDWR, 0o644)
            try:
                fcntl.flock(held, fcntl.LOCK_EX)
                yield
            finally:
                os.close(held)

    @contextlib.contextmanager
    def _same_file(self, mode: str) -> Iterator[BinaryIO]:
        """Open the file that was opened first, as long as it has what was read of it."""
        try:
            file = cast(BinaryIO, open(self._path, mode))  # noqa: SIM115  (closed below)
        except FileNotFoundError:
            raise self._lost() from None
        with file:
            if _identity(file) != self._identity or os.fstat(file.fileno()).st_size < self._ends[-1]:
                raise self._lost()
            yield file

    def _lost(self) -> StorageError:
        text = f"the journal {self._path} was deleted or replaced while the search used it"
        return StorageError(f"{text}; trials that only it held are lost: {CURE}")


def _identity(file: BinaryIO) -> tuple[int, int]:
    status = os.fstat(file.fileno())
    return status.st_dev, status.st_ino


def _drop_torn_line(file: BinaryIO) -> None:
    """Cut off a killed process's partial line: text appended to it could not be read."""
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


def _patient(url: str, storage: BaseStorage) -> BaseStorage:
    return cast(BaseStorage, PatientStorage(url, storage))


class PatientStorage:
    """A storage that retries calls while its database is away; each call is safe to repeat."""

    def __init__(self, url: str, storage: BaseStorage) -> None:
        self._url, self._storage = url, storage

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._storage, name)
        return functools.partial(self._again, found) if callable(found) else found

    def create_new_trial(self, study_id: int, template_trial: FrozenTrial | None = None) -> int:
        """A new trial; where the connection broke the first time, the one that is there already."""
        if template_trial is None:
            return self._again(self._storage.create_new_trial, study_id)
        token = secrets.token_hex(8)
        template_trial.set_user_attr("token", token)
        tried = False

        def write() -> int:
            nonlocal tried
            before, tried = tried, True
            for trial in self._storage.get_all_trials(study_id, deepcopy=False) if before else ():
                if trial.user_attrs.get("token") == token:
                    return trial._trial_id
            return self._storage.create_new_trial(study_id, template_trial)

        return self._again(write)

    def _again(self, call: Callable[..., T], *arguments: Any, **options: Any) -> T:
        begun, pause = time.monotonic(), 0.05
        while True:
            try:
                return call(*arguments, **options)
            except StorageError:
                raise
            except OSError as error:
                raise StorageError(f"the storage {self._url} cannot be written: {error.strerror or error}") from error
            except Exception as error:
                if not _is_away(error):
                    raise
                if time.monotonic() > begun + AGAIN_S:
                    raise BadInput(f"the storage {self._url} has been away for {AGAIN_S:g} s; when it is back, "
                                   "resume the search") from error  # fmt: skip
            with contextlib.suppress(Exception):  # what was under way on the broken connection is rolled back
                self._storage.remove_session()
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
