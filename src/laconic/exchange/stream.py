"""Send gradients: buckets in the same order on all ranks, averaged on the exchange thread.

A sink says when a gradient is made, and when its mean is needed. There are three: DDP's hook (`ddp.py`), FSDP's
reduce-scatter (`fsdp.py`) and the optimiser's step (`consistency/modes/sync.py`). The stream owns the rest: the
buckets and their sections, the order in which they are sent, what shares a message, this job's share of the exchange
thread, and the first error.

A complete bucket is sent once those before it in the order have been sent, so ranks match even if their gradients come
in different orders. If payloads are small, a bucket is held until it fills a message together with the next ones, or
the step's last has come. A bucket that no codec touches goes by the engine's own future, without the
exchange thread: the float32 shortcut. gloo matches its own all-reduces by their order, so they must all come from one
thread: the shortcut is open for a step only when all its buckets are exact, as in a step before, and nobody else uses
the transport.

Invariant: every future is set. Every exchange ends within the transport's time-out, in data or an error. If a bucket is
held for one that never comes, the idle exchange thread gives it up after the same time. After an error the other ranks
are told, and gradients become NaN, so that no bad step goes unnoticed.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from laconic.errors import CollectiveTimeout
from laconic.exchange.buckets import BucketExchange
from laconic.exchange.collectives import broadcast
from laconic.exchange.former import FormerBuckets
from laconic.exchange.layout import FlatBuffer, Gradients, divides_first, equal_slices
from laconic.exchange.order import Timeline, best_order
from laconic.exchange.thread import EXCHANGE_THREAD, ThreadShare
from laconic.transports.base import Pause, Pausing

REORDERED = (2, 5, 10, 20, 50)  # after so many steps, and then each 100, the order of sections is agreed on anew
SEEN = 5  # steps whose times the order is chosen by
_NOTHING = torch.empty(0)
_log = logging.getLogger("laconic.exchange")


class Bucket:
    """Gradients that are handed over together, and their progress.

    Args:
        buffer: where the gradients are copied to; None leaves the one gradient where autograd made it.
        section_nbytes: about how much of it is exchanged by itself; None exchanges it whole.

    Attributes:
        values: the gradients of this step, flat.
        missing: ids of the parameters whose gradients of this step are not there yet.
        sent: a part of it is under way, or has arrived.
        means: a future of each section, which holds nothing.
        ended: set when the futures of all sent sections are set, successfully or not.
        events: on a device, one per stream that made one of its gradients in this step.
        returned: on a device, the events after which its sections' means are ready.
        ready_s: when its last gradient was made, from the start of backward.
        needed_s: when the next forward first needed its weights, from the start of that forward.
    """

    def __init__(
        self, number: int, parameters: Sequence[nn.Parameter], buffer: FlatBuffer | None, section_nbytes: int | None
    ) -> None:
        self.number = number
        self.parameters = tuple(parameters)
        self.buffer = buffer
        self.values = _NOTHING if buffer is None else buffer.values
        numel, itemsize = sum(p.numel() for p in parameters), self.parameters[0].itemsize
        self.sections = equal_slices(numel, itemsize, section_nbytes)
        self.ready_s = self.needed_s = 0.0
        self.events: dict[Any, Any] = {}
        self.returned: list[Any] = []
        self.begin()
        self.forget()

    def begin(self) -> None:
        """Start waiting for the next step's gradients; the last step's futures stay until `forget`."""
        self.missing = {id(parameter) for parameter in self.parameters}

    def let_go(self) -> None:
        """Release this step's gradients, if they are in memory that others own."""
        if self.buffer is None:
            self.values = _NOTHING

    def forget(self) -> None:
        """Drop the futures of what was sent."""
        self.sent = False
        self.means: list[Any] = [torch.futures.Future() for _ in self.sections]
        self.ended: list[threading.Event] = []

    def note_stream(self) -> None:
        """Record an event on the stream that has just made a gradient; another stream may make the next."""
        if (first := self.parameters[0]).is_cpu:
            return
        from laconic.codecs.device.streams import mark

        if (event := mark(first)) is not None:
            self.events[torch.accelerator.current_stream(first.device)] = event

    def let_wait(self) -> None:
        """Make the current stream wait for the other streams' work on this bucket."""
        for event in (*self.events.values(), *self.returned):
            torch.accelerator.current_stream(event.device).wait_event(event)


class GradientStream:
    """Sends the gradients of one model.

    Attributes:
        buckets: the stream's own; none where the sink submits DDP's.
        order: numbers of the sections, as they are sent; the same on all ranks.
        failure: the first error.
        step: the step under way.
        waited_s: how long the training has waited for means, and `waits` from when to when, the last times.
    """

    def __init__(self, exchange: BucketExchange) -> None:
        self.exchange = exchange
        self.failure: Exception | None = None
        self.step = 0
        self.waited_s = 0.0
        self.waits: deque[tuple[float, float]] = deque(maxlen=256)
        self._share: ThreadShare | None = None
        self._lock = threading.Lock()  # of what is held
        self._sending = threading.Lock()
        self._held: list[Gradients] = []
        self._overdue: Callable[[], CollectiveTimeout | None] = lambda: None  # why to hold no longer
        self._given_up: CollectiveTimeout | None = None  # in this step
        self._former: FormerBuckets | None = None  # which the next step is exchanged in
        self._plain: dict[int, object] = {}  # layouts of buckets that went as float32, all ranks in the same call
        self._shortcut = False
        self.use(())

    def use(
        self,
        buckets: Sequence[Bucket],
        fill: Callable[[Bucket], None] = lambda _: None,
        *,
        shares_messages: bool = True,
    ) -> None:
        """Send these buckets from now on; `fill` puts a bucket's gradients into its values before it is sent.

        Buckets that share messages keep their order, so that the same ones always travel together.
        """
        self.buckets = list(buckets)
        self._fill = fill
        self._shares_messages = shares_messages
        self._sections = [(bucket, place) for bucket in self.buckets for place in range(len(bucket.sections))]
        self.order = list(range(len(self._sections)))
        self._wire_s = [0.0 for _ in self._sections]
        self._next = 0
        self._begun = 0.0  # when backward made the first gradient of this step
        self._ended = 0.0  # when the last exchange did
        self._steps = 0
        self._shared = False  # some buckets travelled together
        self._ordering: tuple[threading.Event, Tensor] | None = None
        self._seen: deque[Timeline] = deque(maxlen=SEEN)

    # what a sink says

    def begin(self, step: int) -> None:
        """Begin step number `step`."""
        self.step, self._next, self._begun = step, 0, 0.0
        for bucket in self.buckets:
            bucket.begin()

    def made(self, bucket: Bucket, parameter: Tensor) -> None:
        """Note a parameter's gradient; if its bucket is complete, send it as far as the order allows."""
        bucket.missing.discard(id(parameter))
        if not bucket.missing:
            self.send_ready()

    def note_time(self, bucket: Bucket, now: float) -> None:
        """Note the time of a bucket's latest gradient."""
        self._begun = self._begun or now
        bucket.ready_s = now - self._begun
        bucket.note_stream()

    def send_ready(self) -> None:
        """Send complete buckets, as far as the order allows."""
        with self._sending:  # autograd has a thread for each device
            if self._next == 0:
                self._take_order()
            while self._next < len(self.order) and not self._sections[self.order[self._next]][0].missing:
                self._send(self.order[self._next])

    def _send(self, number: int) -> None:
        """Send one section, the next in the order; before the first of its bucket all of it is filled."""
        first, self._next = self._next == 0, self._next + 1
        (bucket, place), last = self._sections[number], self._next == len(self.order)
        (start, stop), mean, ended = bucket.sections[place], bucket.means[place], threading.Event()
        if not bucket.sent:
            bucket.let_wait()
            bucket.events.clear()
            bucket.returned.clear()
            self._fill(bucket)
            bucket.sent = True
        given = Gradients(
            bucket.values[start:stop], number, bucket.parameters, self.step, last, mean, first, start
        )

        def came(_: Any) -> None:
            if given.returned is not None:
                bucket.returned.append(given.returned)
            ended.set()

        mean.add_done_callback(came)
        bucket.ended.append(ended)
        self._submit(given)

    def submit(self, buffer: Tensor, index: int, parameters: Sequence[Tensor], *, last: bool) -> Any:
        """Start the exchange of one of DDP's buckets; returns a future of its buffer."""
        given = Gradients(buffer, index, parameters, self.exchange.step, last, first=index == 0)
        given.future = torch.futures.Future(devices=[] if given.event is None else [buffer.device])
        return self._submit(given)

    def start(self, work: Callable[[], Pausing[Any]], ready: Pause = None) -> Callable[[], None]:
        """Run an exchange of the sink's own on the exchange thread, after `ready`; returns what waits for its end."""

        def attempt() -> Pausing[None]:
            try:
                if not self._leaves_out():
                    yield from work()
            except Exception as error:
                self.fail(error)

        done = self._started().submit(attempt, ready)

        def wait() -> None:
            done.wait()
            self.raise_first()

        return wait

    # on the way to the exchange thread

    def _submit(self, gradients: Gradients) -> Any:
        """Send a bucket, or hold it for the next one's messages; returns a future of its buffer."""
        if self.exchange.choice.learns and gradients.event is None:
            self.exchange.choice.note_ready(gradients.index, gradients.step)
        if gradients.first:
            self._begin_step(gradients.step)
            if self.exchange.loss_scale is not None:
                self.exchange.loss_scale.note(gradients.buffer)
        self._shortcut = self._shortcut and self._plain.get(gradients.index) == gradients.layout
        if self._shortcut:
            return self._take_shortcut(gradients)
        with self._lock:
            if self._given_up is not None:
                self.fail(self._given_up)
            if self._former is None:
                self._take(gradients)
            else:
                self._take_as_before(gradients, self._former)
        return gradients.future

    def _begin_step(self, step: int) -> None:
        """Forget a backward that did not end, and decide whether the float32 shortcut is open."""
        with self._lock:
            self._held, self._given_up = [], None
        share, transport = self._started(), self.exchange.world.transport
        open_ = self._shares_messages and transport.has_futures and share.alone and self.failure is None
        try:
            self._shortcut = open_ and self.exchange.choice.is_exact(step)
        except Exception:  # the user's function failed: it will again, on the exchange thread, which reports it
            self._shortcut = False

    def _started(self) -> ThreadShare:
        if self._share is None:
            self._share = ThreadShare(self.exchange.world.transport, self._look)
        return self._share

    def _take_shortcut(self, gradients: Gradients) -> Any:
        """Start the engine's all-reduce; returns a future of the mean."""
        begun, buffer, transport = time.perf_counter(), gradients.buffer, self.exchange.world.transport

        def finish(future: Any) -> None:
            try:
                future.value()
                if not divides_first(buffer):
                    buffer.div_(transport.world_size)
                self.exchange.went_plain(gradients, begun)
            except Exception as error:
                self.fail(transport.explain(error))  # type: ignore[attr-defined]
            self._set(gradients)

        if divides_first(buffer):
            buffer.div_(transport.world_size)
        transport.native_future(buffer).add_done_callback(finish)
        return gradients.future

    def _take(self, gradients: Gradients) -> None:
        """Send a bucket, with the held ones or alone, or hold it."""
        if self._held and not self._alike(gradients):
            self._let_go()
        self._held.append(gradients)
        if gradients.last or gradients.buffer.is_sparse or not self._may_hold():
            self._let_go()
        elif len(self._held) == 1:
            self._hold()

    def _take_as_before(self, gradients: Gradients, former: FormerBuckets) -> None:
        """Hold all buckets of a step, then send them in the former order."""
        self._held.append(gradients)
        if len(self._held) == 1:
            self._hold()
        if gradients.last:
            self._former, whole, self._held = None, self._held, []
            for each in former.arranged(whole):
                self._take(each)

    def _alike(self, gradients: Gradients) -> bool:
        """Whether a bucket may travel with those that are held, of the same device; sparse ones travel alone."""
        held, codec_for = self._held[0], self.exchange.choice.codec_for
        same = codec_for(gradients.index, gradients.step) == codec_for(held.index, held.step)
        return same and not gradients.buffer.is_sparse and gradients.buffer.device == held.buffer.device

    def _may_hold(self) -> bool:
        """Whether what is held is too little for a message of its own."""
        if not self._shares_messages:
            return False
        try:
            chosen = self.exchange.choice.codec_for(self._held[0].index, self._held[0].step)
        except Exception:  # as above
            return False
        if chosen.kind == "matrix" or chosen.exact:
            return False
        return sum(chosen.max_nbytes(held.buffer.numel()) for held in self._held) < self.exchange.message_nbytes

    def _hold(self) -> None:
        """Wait for the next bucket, no longer than for a message."""
        self._started().started()
        transport, first = self.exchange.world.transport, self._held[0]
        until = time.monotonic() + transport.timeout_s

        def overdue() -> CollectiveTimeout | None:
            if time.monotonic() < until:
                return None
            where = f"[rank {transport.rank}/{transport.world_size}] step {first.step}"
            text = f"bucket {first.index} is held for the next one, which did not come in {transport.timeout_s:g} s"
            return CollectiveTimeout(f"{where}: {text}: backward has stopped", rank=transport.rank)

        self._overdue = overdue

    def _look(self) -> None:
        """Give up buckets held for too long; if backward still goes on, the step fails."""
        with self._lock:
            if self._held and (error := self._overdue()) is not None:
                _log.error("%s", error)
                self._given_up, held, self._held = error, self._held, []
                for each in held:
                    each.future.set_exception(error)

    def _let_go(self) -> None:
        held, self._held = self._held, []
        self._shared = self._shared or len(held) > 1
        done = self._started().submit(lambda: self._attempt(held), self._bring_here(held))
        done.add_done_callback(lambda future: self._answer(held, future))

    def _bring_here(self, held: list[Gradients]) -> Pause:
        """Start copying a device's gradients; returns a function that waits for the last, or None."""
        try:
            waits = [self.exchange.start(each) for each in held if not each.buffer.is_cpu]
        except Exception as error:
            self.fail(error, expected=True)
            return None
        last = waits[-1] if waits else None
        if last is None or not self.exchange.choice.learns:
            return last

        def come() -> None:  # a hook is called before a device has made the gradient: its event tells when
            last()
            for each in held:
                self.exchange.choice.note_ready(each.index, each.step)

        return come

    # on the exchange thread

    def _attempt(self, held: list[Gradients]) -> Pausing[None]:
        """Exchange buckets that travel together, unless there was an error before."""
        try:
            if not self._leaves_out():
                plain = yield from self.exchange.steps(held)
                for each in held:
                    self._plain.pop(each.index, None)
                    if plain:
                        self._plain[each.index] = each.layout
        except Exception as error:
            self.fail(error)
        now, last = time.perf_counter(), held[-1]
        if last.index < len(self._wire_s):
            self._wire_s[last.index] = now - max(last.made, self._ended)
        self._ended = now

    def _leaves_out(self) -> bool:
        """Whether an error came before this exchange; tells the other ranks, which expect this one in it."""
        if self.failure is not None:
            reason = f"{type(self.failure).__name__}: {self.failure}"
            self.exchange.world.transport.abandon(reason, expected=True)
        return self.failure is not None

    def _answer(self, held: list[Gradients], done: Any) -> None:
        """Set the buckets' futures, whatever happened on the exchange thread."""
        try:
            done.value()
        except Exception as error:
            self.fail(error)
        for each in held:
            self._set(each)

    def _set(self, gradients: Gradients) -> None:
        """Set a bucket's future: DDP's to its buffer; ours to nothing, for it would keep the gradients in memory."""
        buffer = gradients.buffer
        with nullcontext() if buffer.is_cpu else self.exchange.staging.copying(buffer.device):
            if self.failure is not None:
                self.exchange.staging.spoil(gradients)
            gradients.future.set_result(None if self.buckets else buffer)

    def on_thread(self) -> bool:
        """Whether the caller is the exchange thread."""
        return threading.current_thread().name == EXCHANGE_THREAD

    # errors and waits

    def fail(self, error: Exception, *, expected: bool = False) -> None:
        """Keep the first error, and tell the other ranks: a bucket that is under way too fails because of it.

        `expected`: no exchange is under way here, but the others wait for the one that could not be begun.
        """
        if self.failure is None:
            self.failure = error
            _log.error("the exchange of gradients failed: %s: %s", type(error).__name__, error)
            self.exchange.world.transport.abandon(f"{type(error).__name__}: {error}", expected=expected)

    def raise_first(self) -> None:
        """Raise the first error, if any."""
        if self.failure is not None:
            raise self.failure

    def wait(self, bucket: Bucket) -> None:
        """Wait until a sent bucket holds the mean; raises the first error of any bucket."""
        for ended in bucket.ended:
            if not ended.is_set():
                self._wait(ended, f"the mean of bucket {bucket.number}")
        bucket.let_wait()
        self.raise_first()

    def wait_all(self) -> None:
        """Wait until nothing is under way."""
        if self._ordering is not None:
            self._wait(self._ordering[0], "the order of buckets")
        for bucket in self.buckets:
            self.wait(bucket)

    def _wait(self, event: threading.Event, what: str) -> None:
        """Wait for a future; each exchange ahead of it may take one time-out."""
        begun, transport = time.perf_counter(), self.exchange.world.transport
        patience_s = transport.timeout_s * (len(self.order) + 2)
        if not event.wait(patience_s):
            text = f"[rank {transport.rank}/{transport.world_size}] step {self.step}: {what} did not come"
            raise CollectiveTimeout(f"{text} in {patience_s:g} s", rank=transport.rank)
        ended = time.perf_counter()
        self.waited_s += ended - begun
        self.waits.append((begun, ended))

    # the order

    def end_step(self) -> None:
        """Record a step's times; periodically switch all ranks to rank 0's best order from the next step on.

        All ranks call it in the same step. Of exchanges that are still under way the times are those of the step
        before.
        """
        self._steps += 1
        if self._shared:
            return
        owners = [bucket for bucket, _ in self._sections]
        ready, needed = [bucket.ready_s for bucket in owners], [bucket.needed_s for bucket in owners]
        self._seen.append(Timeline(ready, list(self._wire_s), needed))
        if self._steps in REORDERED or self._steps % 100 == 0:
            found, ended = torch.tensor(best_order(self._seen), dtype=torch.int64), threading.Event()
            self._started().submit(lambda: self._spread(found)).add_done_callback(lambda _: ended.set())
            self._ordering = ended, found

    def _spread(self, order: Tensor) -> Pausing[None]:
        try:
            if not self._leaves_out():
                broadcast(order, root=0, group=self.exchange.world)
        except Exception as error:
            self.fail(error)
        yield None

    def _take_order(self) -> None:
        """Switch to the newly agreed order."""
        if self._ordering is not None:
            self._wait(self._ordering[0], "the order of buckets")
            order, self._ordering = self._ordering[1].tolist(), None
            if self.failure is None:
                self.order = order

    def in_order(self) -> list[Bucket]:
        """The buckets, by when the last section of each is sent."""
        last = {self._sections[number][0].number: place for place, number in enumerate(self.order)}
        return sorted(self.buckets, key=lambda bucket: last[bucket.number])

    # the job's life

    def restart(self, former: FormerBuckets | None = None) -> None:
        """Forget earlier steps; exchange the next one in DDP's `former` buckets."""
        self._plain.clear()
        self._former = None if self.buckets else former

    def close(self) -> None:
        """Join the exchange thread, unless others use it; safe to call twice."""
        if self._share is not None:
            self._share.close()
            self._share = None
