"""The exchange thread, one per transport, shared by all its users: jobs run in order while training goes on.

Caller: `stream.py`. A job pauses (yields) where it can only wait for its messages. Meanwhile the thread begins the next
job, so that it is encoded while the first is on the wire. A second thread does the waiting, so that a job submitted
meanwhile is also begun at once. A third thread waits for data from a device. Jobs begin and end in the order of
submission. After an error, all later jobs fail with the same error at once.
"""

from __future__ import annotations

import contextlib
import functools
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from laconic.errors import LaconicError
from laconic.transports.base import Pause, Pausing, Transport

Work = Callable[[], Pausing[Any]]
EXCHANGE_THREAD = "laconic-exchange"
DEPTH = 4  # with 2 the wire stood still whenever a peer was a bucket behind
_LOOK_S = 0.25  # how often an idle exchange thread looks at what is held


def interleave(jobs: Sequence[Pausing[Any]], depth: int) -> None:
    """Run jobs on this thread, at most `depth` at once: at a pause the next is begun, then the oldest goes on."""
    waiting, active = deque(jobs), deque[Pausing[Any]]()
    while waiting or active:
        begins = bool(waiting) and len(active) < depth
        if begins:
            active.append(waiting.popleft())
        place = -1 if begins else 0
        try:
            next(active[place])
        except StopIteration:
            del active[place]


@dataclass(eq=False)
class _Job:
    """A job that was begun."""

    steps: Pausing[Any]
    future: Any
    pause: Pause = None  # what it waits for
    watched: bool = False  # by the second thread


class ExchangeThread:
    """One thread that runs jobs in the order they were submitted, at most `depth` at once; without any, `idle`."""

    def __init__(
        self, name: str = EXCHANGE_THREAD, *, depth: int = 1, idle: Callable[[], None] = lambda: None
    ) -> None:
        self._inbox: queue.SimpleQueue[tuple[Work, Any] | _Job | None] = queue.SimpleQueue()  # None: close
        self._depth = depth
        self._idle = idle
        self._active: deque[_Job] = deque()
        self._failure: BaseException | None = None
        self._watcher = _Watcher(f"{name}-2")
        self._arrivals = _Watcher(f"{name}-3")
        self._lock = threading.Lock()  # of `_expected`, and the order of the inbox
        self._expected = 0  # jobs whose inputs are waited for, and those behind them
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Work, ready: Pause = None) -> Any:
        """Queue a job, a function that makes a generator; returns a torch future of what it returns.

        `ready` returns when the job's inputs have come from a device. Until then neither it nor a later job is begun:
        ranks begin jobs in the same order. Those that were begun go on.
        """
        future: Any = torch.futures.Future()
        if not self._thread.is_alive():
            future.set_exception(LaconicError("the exchange thread is closed"))
        else:
            self._queue((job, future), ready)
        return future

    def _queue(self, entry: tuple[Work, Any] | None, ready: Pause = None) -> None:
        with self._lock:
            if ready is None and not self._expected:
                self._inbox.put(entry)
                return
            self._expected += 1
        self._arrivals.watch(ready or (lambda: None), functools.partial(self._arrived, entry))

    def _arrived(self, entry: tuple[Work, Any] | None) -> None:
        with self._lock:
            self._expected -= 1
            self._inbox.put(entry)

    def _run(self) -> None:
        closing = False
        while self._active or not closing:
            oldest = self._active[0] if self._active else None
            if closing or len(self._active) >= self._depth:
                self._advance(self._active[0])
                continue
            try:
                entry = self._inbox.get(block=oldest is None or oldest.watched, timeout=_LOOK_S)
            except queue.Empty:
                self._wait(oldest)
                continue
            if entry is None:
                closing = True
            elif not isinstance(entry, _Job):
                self._begin(*entry)
            elif entry is oldest:  # what it waits for has come; else it went on without
                self._advance(oldest)
            del entry  # or the last job, and all it refers to, would live as long as this thread
        self._watcher.close()
        self._arrivals.close()

    def _wait(self, oldest: _Job | None) -> None:
        """Wait while there is no job to begin."""
        if oldest is None:
            self._idle()
        elif oldest.pause is None:
            self._advance(oldest)
        elif not oldest.watched:
            oldest.watched = True
            assert oldest.pause is not None
            self._watcher.watch(oldest.pause, functools.partial(self._inbox.put, oldest))

    def _begin(self, job: Work, future: Any) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        self._active.append(_Job(job(), future))
        self._advance(self._active[-1])

    def _advance(self, job: _Job) -> None:
        """Run a job up to its next pause, or to its end."""
        job.watched = False
        try:
            job.pause = next(job.steps)
        except StopIteration as done:
            self._active.remove(job)
            job.future.set_result(done.value)
        except Exception as error:
            self._failure = error
            for each in self._active:
                each.future.set_exception(error)
            self._active.clear()

    def close(self) -> None:
        """Finish what is queued and join the thread; safe to call twice, and on the thread itself, which then ends."""
        if self._thread.is_alive():
            self._queue(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()


class _Watcher:
    """A thread that runs waits one after the other, and reports each end; started at first use."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._tasks: queue.SimpleQueue[tuple[Callable[[], None], Callable[[], None]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None

    def watch(self, wait: Callable[[], None], came: Callable[[], None]) -> None:
        """Call `came` when `wait` has returned."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
            self._thread.start()
        self._tasks.put((wait, came))

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            with contextlib.suppress(Exception):  # the job meets it, too
                task[0]()
            task[1]()
            del task

    def close(self) -> None:
        self._tasks.put(None)
        if self._thread is not None:
            self._thread.join()


@dataclass
class _Shared:
    """The exchange thread of one transport and its users: calls on one transport come from one thread, in order."""

    users: dict[object, weakref.WeakMethod[Callable[[], None]] | None] = field(default_factory=dict)
    thread: ExchangeThread | None = None

    def look(self) -> None:
        """Call every user's `look`."""
        for method in list(self.users.values()):
            if method is not None and (look := method()) is not None:
                look()


_shared: weakref.WeakKeyDictionary[Transport, _Shared] = weakref.WeakKeyDictionary()


class ThreadShare:
    """A user's share of a transport's exchange thread; the last user joins it. When idle, it calls `look`, a method."""

    def __init__(self, transport: Transport, look: Callable[[], None] | None = None) -> None:
        self._depth = depth_of(transport)
        self._shared = _shared.setdefault(transport, _Shared())
        token = object()
        self._shared.users[token] = None if look is None else weakref.WeakMethod(look)
        self.close = weakref.finalize(self, _leave, self._shared, token)  # also when the share is forgotten

    @property
    def alone(self) -> bool:
        """Whether this is the transport's only user."""
        return len(self._shared.users) == 1

    def submit(self, job: Work, ready: Pause = None) -> Any:
        """Queue a job, as `ExchangeThread.submit`."""
        return self.started().submit(job, ready)

    def started(self) -> ExchangeThread:
        """Return the thread, started if necessary."""
        if self._shared.thread is None:
            self._shared.thread = ExchangeThread(depth=self._depth, idle=self._shared.look)
        return self._shared.thread


def depth_of(transport: Transport) -> int:
    """How many exchanges may be under way at once: one is encoded while another is on the wire."""
    return DEPTH if transport.interleaves else 1


def _leave(shared: _Shared, token: object) -> None:
    shared.users.pop(token, None)
    if not shared.users and shared.thread is not None:
        shared.thread.close()
        shared.thread = None
