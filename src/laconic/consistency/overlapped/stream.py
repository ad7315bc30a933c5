"""Gradients that are sent as backward makes them, and applied when the next forward needs their weights.

Caller: synchronous `distribute`. The road of a bucket: its last gradient is made (a hook) and it is copied into the
bucket's buffer. The exchange thread averages it while backward goes on. `step()` puts down the optimiser's settings and
returns. The first touch of one of its weights waits for the mean and takes the bucket's part of the step. Every forward
sees the bits it would see without all this: only the time at which things happen is another.

What cannot be hidden is recognised by the loop's habits (`habits.py`). A step that is unlike those before is refused
where its gradients were under way already, before it has changed any weight.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from laconic.consistency.overlapped.habits import WATCHED, Habits
from laconic.consistency.overlapped.sending import Bucket, Made, Sending
from laconic.consistency.overlapped.touch import Touches
from laconic.consistency.overlapped.updates import BucketSteps
from laconic.errors import BadInput, LaconicError
from laconic.exchange.layout import FlatGradients, lies_in, places_in
from laconic.exchange.state import CompressionState

REORDERED = (WATCHED, 5, 10, 20, 50)  # after so many steps, and then each 100, the order of buckets is agreed on anew
Ended = Callable[[int, float, float], None]


class Stream:
    """The exchange of one model's gradients under whatever else goes on.

    Args:
        ended: called with each step's number, and the seconds its exchange held up the training, in all and waiting.

    Attributes:
        waits: from when to when the training has waited for exchanges to end, the last times.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        gradients: FlatGradients,
        state: CompressionState,
        ended: Ended,
    ) -> None:
        self._transport, self._ended = state.world.transport, ended
        self._habits = Habits(model, optimizer, state)
        self._sending = Sending(gradients, state)
        self.waits = self._sending.waits
        self._updates = BucketSteps(optimizer, gradients.buffers)
        self._bucket_of = {id(p): b for b in self._sending.buckets for p in b.buffer.parameters}
        self._views = places_in(gradients.buffers)
        self.step = state.step
        self._unapplied: list[Bucket] = []  # of the last step, in the order they were sent
        self._evaluated = False  # in this step, by a closure
        self._backward = self._forward = self._seconds = 0.0
        self._lock = threading.RLock()  # whoever touches a weight may take its bucket's step
        self._trainer = threading.get_ident()  # the thread of the loop, whose the gradients are
        self._touches = Touches(model, self._touch)
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._gradient_made)  # type: ignore[no-untyped-call]
            for bucket in self._sending.buckets
            for p in bucket.buffer.parameters
        ]
        self._handles.append(optimizer.register_state_dict_pre_hook(lambda _: self.settle()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()))
        self._guard = weakref.WeakMethod(self._before_call)
        self._transport.guards.append(self._guard)

    # backward

    def _gradient_made(self, parameter: Tensor) -> None:
        """A hook: autograd has added to this parameter's gradient."""
        now, key, gradient, habits = time.perf_counter(), id(parameter), parameter.grad, self._habits
        bucket = self._bucket_of[key]
        if gradient is None:
            return
        if not habits.made:
            self._backward = now
        if key not in habits.made and (lies_in(gradient, self._views[key]) or hasattr(gradient, _OLD)):
            self._note_kept()
        whole = habits.note_made(key)
        if key not in self._touches.seen and bucket.number not in habits.apart:
            self._note_apart(bucket)
        if bucket.sent:
            made = bucket.made.get(key)
            self._refuse(_AGAIN if made is not None and made.gradient is gradient else _SKIPPED)
        if lies_in(gradient, self._views[key]):
            parameter.grad = gradient = gradient.clone()  # the buffer is the exchange's
        bucket.made[key] = Made.of(gradient, watched=habits.watching)
        bucket.ready_s = now - self._backward
        if whole:
            bucket.whole.add(key)
            if bucket.is_whole and not habits.why_late:
                self._sending.send_whole()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that are made inside are not the last of their step; one may lie in another."""
        self._habits.holding += 1
        try:
            yield
        finally:
            self._habits.holding -= 1

    # step

    def before_step(self) -> None:
        """Send what backward has not sent, and leave to the optimiser only what must not wait."""
        begun = time.perf_counter()
        self.settle()
        for bucket in self._sending.buckets:
            if not bucket.unchanged():
                self._habits.changed = True
                if bucket.sent:
                    self._refuse("gradients were changed between backward, which sent them, and step()")
            bucket.whole.update(map(id, bucket.buffer.parameters))
        self._sending.send_whole()
        self._habits.look_at_optimizer()
        self._updates.begin()
        for bucket in self._sending.buckets:
            now = self._steps_now(bucket)
            if now:
                self._sending.wait(bucket)
            for parameter in bucket.buffer.parameters:
                parameter.grad = self._views[id(parameter)] if now else None
        self._seconds += time.perf_counter() - begun

    def _steps_now(self, bucket: Bucket) -> bool:
        return bool(self._habits.why_not) or bucket.number in self._habits.apart

    def evaluated(self) -> None:
        """The optimiser has evaluated its closure, and wants the means now: an exchange of its own."""
        self._habits.note_closure()
        self._evaluated = True
        self.before_step()
        self._exchanged()

    def after_step(self) -> None:
        """The optimiser has stepped what must not wait."""
        if not self._evaluated:  # else each evaluation was
            self._exchanged()
        self._evaluated = False

    def _exchanged(self) -> None:
        """Leave the updates to whoever touches the weights next, which another thread may do meanwhile."""
        with self._lock:
            begun, sending = time.perf_counter(), self._sending
            self._trainer = threading.get_ident()
            self._unapplied = [bucket for bucket in sending.in_order() if not self._steps_now(bucket)]
            for bucket in self._unapplied:
                for parameter in bucket.buffer.parameters:
                    if (made := bucket.made.get(id(parameter))) is not None:
                        setattr(made.gradient, _OLD, True)
                        parameter.grad = made.gradient  # this rank's own: the mean may still be under way
            for bucket in sending.buckets:
                bucket.begin()
                if bucket not in self._unapplied:
                    bucket.sent = []
            self._habits.end_step(len(sending.buckets))
            sending.note_times()
            if self._habits.steps in REORDERED or self._habits.steps % 100 == 0:
                sending.reorder()
            self._touches.seen.clear()
            self._forward = 0.0
            self.restart(self.step + 1)
            self._seconds += time.perf_counter() - begun
            if not self._unapplied:
                self._step_ended()

    def restart(self, step: int) -> None:
        """Go on with step number `step`."""
        self.step = step
        self._sending.begin(step)

    # the next forward

    def _touch(self, parameter: Tensor) -> None:
        """Somebody takes this parameter from its module: it is to be up to date."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or bucket.touched or self._sending.on_thread():
            return
        with self._lock:
            now = time.perf_counter()
            self._forward = self._forward or now
            bucket.needed_s = now - self._forward
            if bucket in self._unapplied:
                self._apply(bucket)
                self._forward += time.perf_counter() - now  # what it takes is no part of the forward
            bucket.touched = True

    def _apply(self, bucket: Bucket) -> None:
        begun = time.perf_counter()
        self._sending.wait(bucket)
        if bucket.versions != [parameter._version for parameter in bucket.buffer.parameters]:
            self._refuse(f"weights of bucket {bucket.number} were changed before their update had come")
        try:
            self._updates.apply(bucket.number)
        except BaseException as error:
            text = f"the update of bucket {bucket.number} was broken off by {type(error).__name__}: {error}"
            self._sending.fail(LaconicError(f"step {self.step - 1}: {text}; go on from a checkpoint"))
            raise
        for parameter in bucket.buffer.parameters if threading.get_ident() == self._trainer else ():
            if hasattr(parameter.grad, _OLD):  # nobody has reset it, nor can another thread now: it can be the mean
                parameter.grad = self._views[id(parameter)]
        self._unapplied.remove(bucket)
        bucket.sent = []
        self._seconds += time.perf_counter() - begun
        if not self._unapplied:
            self._step_ended()

    def settle(self) -> None:
        """Bring all weights up to date."""
        with self._lock:
            for bucket in list(self._unapplied):
                self._apply(bucket)

    def check_between(self) -> None:
        """Refuse what makes sense between two steps only: backward has sent gradients that no step has applied."""
        if any(bucket.sent and bucket not in self._unapplied for bucket in self._sending.buckets):
            text = "backward has sent gradients of it already; save before backward, or after step()"
            raise BadInput(f"step {self.step} is under way: {text}")

    def _note_kept(self) -> None:
        """A gradient was not None when backward began to make it."""
        self._habits.kept = True
        if not self._habits.why_not:
            self._refuse("gradients were not set to None since the last step, whose means they should be by now")

    def _note_apart(self, bucket: Bucket) -> None:
        """A gradient came of weights that nobody took from their module in this step."""
        if not self._habits.why_not:
            self._refuse(f"weights of bucket {bucket.number} were used otherwise than through their modules")
        self._habits.apart.add(bucket.number)  # no harm: nothing was put off

    def _step_ended(self) -> None:
        seconds, self._seconds = self._seconds, 0.0
        waited_s, self._sending.waited_s = self._sending.waited_s, 0.0
        self._ended(self.step - 1, seconds, waited_s)

    def _before_call(self) -> None:
        """Somebody is about to use the transport, which the exchange thread has to itself until then."""
        if not self._sending.on_thread():
            self._habits.called = self._habits.called or bool(self._habits.made)
            self._sending.wait_all()

    def _refuse(self, text: str) -> NoReturn:
        error = BadInput(f"step {self.step}: {text}; or give overlap=False")
        self._sending.fail(error)
        raise error

    def explain(self) -> str:
        """What is hidden, and why the rest is not."""
        return f"{self._habits.explain()}\nsections are sent in the order {', '.join(map(str, self._sending.order))}"

    def close(self) -> None:
        """Bring all weights up to date and take the hooks off; what went wrong is raised after that."""
        try:
            self.settle()
            self._sending.wait_all()
        finally:
            self._unapplied = []
            self._touches.close()
            for handle in self._handles:
                handle.remove()
            if self._guard in self._transport.guards:
                self._transport.guards.remove(self._guard)
            self._sending.close()


_OLD = "_laconic_of_an_earlier_step"  # the attribute of a gradient that has been exchanged
_AGAIN = "backward added to gradients that were already sent; run all but the last in job.no_sync()"
_SKIPPED = "backward ran again, and gradients that were already sent were never applied: no step may be left out"
