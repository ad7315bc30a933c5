"""Buckets on their way through the exchange thread, in an order that all ranks have agreed on.

Caller: `stream.py`, which says when a bucket's gradients are whole. A bucket that is whole is sent when all before it
in the order have been: ranks whose gradients come in different orders still match.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.consistency.overlapped.order import Timeline, best_order
from laconic.errors import CollectiveTimeout
from laconic.exchange.collectives import broadcast
from laconic.exchange.layout import FlatBuffer, FlatGradients, Gradients, lies_in, write
from laconic.exchange.state import CompressionState
from laconic.exchange.thread import EXCHANGE_THREAD, ThreadShare
from laconic.transports.base import Pausing

_log = logging.getLogger("laconic.consistency")
SEEN = 5  # steps whose times the order of buckets is chosen by


@dataclass(frozen=True)
class Made:
    """A gradient as backward left it."""

    gradient: Tensor
    version: int
    summary: str  # while a loop's habits are watched

    @classmethod
    def of(cls, gradient: Tensor, *, watched: bool) -> Made:
        return cls(gradient, gradient._version, _summary(gradient) if watched else "")

    def is_still(self, gradient: Tensor | None) -> bool:
        """Whether it is this gradient, unchanged; what changes by way of `.data` shows in a summary only."""
        if gradient is None or gradient is not self.gradient or gradient._version != self.version:
            return False
        return not self.summary or self.summary == _summary(gradient)


def _summary(gradient: Tensor) -> str:
    values = gradient.detach()
    return "sparse" if values.is_sparse else f"{values.sum().item()} {torch.linalg.vector_norm(values).item()}"


class Bucket:
    """A flat buffer of gradients and where it is on its way; times are seconds of `time.perf_counter`.

    Attributes:
        whole: ids of the parameters whose gradients of this step are all made.
        made: gradients as backward left them, by parameter.
        versions: of the weights that the next update is for.
        sent: of each section that is under way or has come, what is set when its exchange has ended, well or not.
    """

    def __init__(self, number: int, buffer: FlatBuffer) -> None:
        self.number = number
        self.buffer = buffer
        self.whole: set[int] = set()
        self.made: dict[int, Made] = {}
        self.versions: list[int] = []
        self.sent: list[threading.Event] = []
        self.ready_s = self.needed_s = 0.0
        self.touched = False

    @property
    def is_whole(self) -> bool:
        return len(self.whole) == len(self.buffer.parameters)

    def place(self) -> None:
        """Copy the gradients into the buffer; zeros where this rank has made none: another may have."""
        self.buffer.check()
        for parameter, view in zip(self.buffer.parameters, self.buffer.views, strict=True):
            if parameter.grad is None or not lies_in(parameter.grad, view):
                write(parameter.grad, view)

    def unchanged(self) -> bool:
        """Whether the gradients are still what backward left."""
        for parameter in self.buffer.parameters:
            gradient, made = parameter.grad, self.made.get(id(parameter))
            if not (gradient is None if made is None else made.is_still(gradient)):
                return False
        return True

    def begin(self) -> None:
        """Forget the gradients of the last step."""
        self.whole.clear()
        self.made.clear()
        self.touched = False
        self.versions = [parameter._version for parameter in self.buffer.parameters]


class Sending:
    """The buckets of a step, sent section by section, in order.

    Attributes:
        order: the sections' numbers, the same on all ranks.
        failure: what went wrong first.
        waited_s: how long the training thread has waited for exchanges to end.
        waits: from when to when, the last ones.
    """

    def __init__(self, gradients: FlatGradients, state: CompressionState) -> None:
        self.buckets = [Bucket(number, buffer) for number, buffer in enumerate(gradients.buffers)]
        self.order = list(range(len(gradients.sections)))
        self._sections = gradients.sections
        bucket_of = {id(bucket.buffer): bucket for bucket in self.buckets}
        self._owners = [bucket_of[id(section.buffer)] for section in self._sections]
        self._wire_s = [0.0 for _ in self._sections]
        self.failure: Exception | None = None
        self.waited_s = 0.0
        self.waits: deque[tuple[float, float]] = deque(maxlen=256)
        self._state = state
        self._step = 0
        self._next = 0
        self._ended = 0.0
        self._ordering: tuple[threading.Event, Tensor] | None = None
        self._seen: deque[Timeline] = deque(maxlen=SEEN)
        self._thread = ThreadShare(state.world.transport)

    def on_thread(self) -> bool:
        """Whether the exchange thread is asking."""
        return threading.current_thread().name == EXCHANGE_THREAD

    def begin(self, step: int) -> None:
        """Begin step number `step`."""
        self._step, self._next = step, 0

    def send_whole(self) -> None:
        """Send what is whole, as far as the order allows."""
        if self._next == 0:
            self._take_order()
        while self._next < len(self.order) and self._owners[self.order[self._next]].is_whole:
            self._send(self.order[self._next])

    def _send(self, number: int) -> None:
        """Send one section, the next in the order; the first of its bucket places all."""
        first, self._next = self._next == 0, self._next + 1
        section, bucket, last = self._sections[number], self._owners[number], self._next == len(self.order)
        if not bucket.sent:
            bucket.place()
        parameters = section.buffer.parameters
        gradients = Gradients(section.values, number, parameters, self._step, last, first=first, start=section.start)
        self._state.choice.note_ready(number, self._step)
        bucket.sent.append(self._submit(lambda: self._travel(gradients)))

    def _submit(self, work: Callable[[], Pausing[Any]]) -> threading.Event:
        ended = threading.Event()

        def note(done: Any) -> None:
            try:
                done.value()
            except Exception as error:
                self.fail(error)
            ended.set()

        self._thread.submit(work).add_done_callback(note)
        return ended

    def _travel(self, gradients: Gradients) -> Pausing[None]:
        """On the exchange thread: one section's exchange."""
        try:
            if self.failure is None:
                yield from self._state.steps([gradients])
        except Exception as error:
            self.fail(error)
        now = time.perf_counter()
        self._wire_s[gradients.index] = now - max(gradients.made, self._ended)
        self._ended = now

    def fail(self, error: Exception) -> None:
        """Keep the first error, and tell the other ranks."""
        if self.failure is None:
            self.failure = error
            _log.error("the exchange of gradients failed: %s: %s", type(error).__name__, error)
            self._state.world.transport.abandon(f"{type(error).__name__}: {error}")

    def wait(self, bucket: Bucket) -> None:
        """Wait until a bucket that was sent holds the mean; raises what went wrong in any."""
        for sent in bucket.sent:
            if not sent.is_set():
                self._wait(sent, f"the mean of bucket {bucket.number}")
        if self.failure is not None:
            raise self.failure

    def wait_all(self) -> None:
        """Wait until nothing is under way."""
        if self._ordering is not None:
            self._wait(self._ordering[0], "the order of buckets")
        for bucket in self.buckets:
            self.wait(bucket)

    def _wait(self, event: threading.Event, what: str) -> None:
        """Every exchange ahead of this one ends within the time-out by itself; so must this."""
        begun, transport = time.perf_counter(), self._state.world.transport
        patience_s = transport.timeout_s * (len(self.order) + 2)
        if not event.wait(patience_s):
            text = f"[rank {transport.rank}/{transport.world_size}] step {self._step}: {what} did not come"
            raise CollectiveTimeout(f"{text} in {patience_s:g} s", rank=transport.rank)
        ended = time.perf_counter()
        self.waited_s += ended - begun
        self.waits.append((begun, ended))

    def note_times(self) -> None:
        """Keep the times of a step that has ended; of exchanges that are still under way, those of the step before."""
        self._seen.append(
            Timeline(
                ready=[bucket.ready_s for bucket in self._owners],
                wire=list(self._wire_s),
                needed=[bucket.needed_s for bucket in self._owners],
            )
        )

    def reorder(self) -> None:
        """Let all ranks use rank 0's best order from the next step on; all must call it, in the same step."""
        found = torch.tensor(best_order(self._seen), dtype=torch.int64)
        self._ordering = self._submit(lambda: self._spread(found)), found

    def _spread(self, order: Tensor) -> Pausing[None]:
        try:
            broadcast(order, root=0, group=self._state.world)
        except Exception as error:
            self.fail(error)
        yield None

    def in_order(self) -> list[Bucket]:
        """The buckets, by when the last section of each is sent."""
        last = {self._owners[number].number: place for place, number in enumerate(self.order)}
        return sorted(self.buckets, key=lambda bucket: last[bucket.number])

    def _take_order(self) -> None:
        if self._ordering is not None:
            self._wait(self._ordering[0], "the order of buckets")
            if self.failure is not None:
                raise self.failure
            self.order, self._ordering = self._ordering[1].tolist(), None

    def close(self) -> None:
        """Leave the exchange thread to its other users."""
        self._thread.close()
