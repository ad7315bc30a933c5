"""The exchange thread: exchanges run on it in order, while backward goes on.

Callers: the DDP hook, one per transport, whoever uses it. A job pauses (yields) where it has nothing to do but wait for
its messages; the next one, if it is there, is begun meanwhile, so that it is encoded while the first is on the wire.
Jobs are begun, and ended, in the order they came.

An error ends up in the future of the job that caused it, so that it surfaces in `backward()`; jobs after it fail with
the same error at once. `close` joins the thread.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import weakref
from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any, TypeVar

import torch

from laconic.errors import LaconicError
from laconic.transports.base import Transport

Job = Callable[[], Generator[None, None, Any]]
T = TypeVar("T")


def interleave(jobs: Sequence[Generator[None, None, T]], depth: int) -> list[T]:
    """Run jobs on this thread, at most `depth` at once: at a pause the next is begun, then the oldest goes on."""
    waiting, active = deque(enumerate(jobs)), deque[tuple[int, Generator[None, None, T]]]()
    results: dict[int, T] = {}
    while waiting or active:
        place = -1 if waiting and len(active) < depth else 0
        if place == -1:
            active.append(waiting.popleft())
        number, steps = active[place]
        try:
            next(steps)
        except StopIteration as done:
            results[number] = done.value
            del active[place]
    return [results[number] for number in range(len(jobs))]


class ExchangeThread:
    """One thread that runs jobs in the order they were submitted.

    Args:
        depth: how many jobs may be under way at once.
    """

    def __init__(self, name: str = "laconic-exchange", *, depth: int = 1) -> None:
        self._jobs: queue.SimpleQueue[tuple[Job, Any] | None] = queue.SimpleQueue()
        self._depth = depth
        self._active: deque[tuple[Generator[None, None, Any], Any]] = deque()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> Any:
        """Queue a job, a function that makes a generator; returns a torch future of what it returns."""
        future: Any = torch.futures.Future()
        if not self._thread.is_alive():
            future.set_exception(LaconicError("the exchange thread is closed"))
        else:
            self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        closing = False
        while self._active or not closing:
            if not closing and len(self._active) < self._depth:
                with contextlib.suppress(queue.Empty):
                    entry = self._jobs.get(block=not self._active)
                    if entry is None:
                        closing = True
                    else:
                        self._begin(*entry)
                        del entry  # or the last job, and all it refers to, would live as long as this thread
                    continue
            self._advance(0)

    def _begin(self, job: Job, future: Any) -> None:
        if self._failure is not None:
            future.set_exception(self._failure)
            return
        self._active.append((job(), future))
        self._advance(-1)

    def _advance(self, place: int) -> None:
        """Run one job up to its next pause, or to its end."""
        steps, future = self._active[place]
        try:
            next(steps)
        except StopIteration as done:
            del self._active[place]
            future.set_result(done.value)
        except Exception as error:
            self._failure = error
            for _, each in self._active:
                each.set_exception(error)
            self._active.clear()

    def close(self) -> None:
        """Finish what is queued and join the thread; safe to call twice, and on the thread itself, which then ends."""
        if self._thread.is_alive():
            self._jobs.put(None)
            if threading.current_thread() is not self._thread:
                self._thread.join()


class _Shared:
    """The exchange thread of one transport and its users: calls on one transport come from one thread, in order."""

    def __init__(self) -> None:
        self.users: set[object] = set()
        self.thread: ExchangeThread | None = None


_shared: weakref.WeakKeyDictionary[Transport, _Shared] = weakref.WeakKeyDictionary()


class ThreadShare:
    """One user's share of a transport's exchange thread, which the first job starts and the last user joins.

    A share that is forgotten is closed.
    """

    def __init__(self, transport: Transport) -> None:
        self._depth = depth_of(transport)
        self._shared = _shared.setdefault(transport, _Shared())
        token = object()
        self._shared.users.add(token)
        self.close = weakref.finalize(self, _leave, self._shared, token)

    @property
    def alone(self) -> bool:
        """Whether nobody else uses the transport."""
        return len(self._shared.users) == 1

    def submit(self, job: Job) -> Any:
        """Queue a job, as `ExchangeThread.submit`."""
        if self._shared.thread is None:
            self._shared.thread = ExchangeThread(depth=self._depth)
        return self._shared.thread.submit(job)


def depth_of(transport: Transport) -> int:
    """How many exchanges may be under way at once: one is encoded while another is on the wire."""
    return 2 if transport.interleaves else 1


def _leave(shared: _Shared, token: object) -> None:
    shared.users.discard(token)
    if not shared.users and shared.thread is not None:
        shared.thread.close()
        shared.thread = None
