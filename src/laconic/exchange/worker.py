"""The communication thread: exchanges run on it in order, while backward goes on.

Callers: the DDP hook, one per process. An error ends up in the future of the job that caused it, so that it surfaces in
`backward()`; jobs after it fail with the same error at once. `close` joins the thread.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from laconic.errors import LaconicError


class Worker:
    """One thread that runs jobs in the order they were submitted."""

    def __init__(self, name: str = "laconic-exchange") -> None:
        self._jobs: queue.SimpleQueue[tuple[Callable[[], Tensor], Any] | None] = queue.SimpleQueue()
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], Tensor]) -> Any:
        """Queue a job; returns a torch future of its tensor."""
        future: Any = torch.futures.Future()
        if not self._thread.is_alive():
            future.set_exception(LaconicError("the communication thread is closed"))
        else:
            self._jobs.put((job, future))
        return future

    def _run(self) -> None:
        while True:
            entry = self._jobs.get()
            if entry is None:
                return
            job, future = entry
            if self._failure is None:
                try:
                    future.set_result(job())
                    continue
                except Exception as error:
                    self._failure = error
            future.set_exception(self._failure)

    def close(self) -> None:
        """Finish what is queued and join the thread; safe to call twice."""
        if self._thread.is_alive():
            self._jobs.put(None)
            self._thread.join()
