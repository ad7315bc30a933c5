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
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from laconic.consistency.overlapped.habits import WATCHED, Habits
from laconic.consistency.overlapped.sending import Bucket, Sending
from laconic.consistency.overlapped.touch import Touches
from laconic.consistency.overlapped.updates import BucketSteps
from laconic.errors import BadInput
from laconic.exchange.layout import FlatBuffer, lies_in
from laconic.exchange.state import CompressionState

REORDERED = (WATCHED, 10, 50)  # after so many steps the order of buckets is agreed on anew
Ended = Callable[[int, float, float], None]


class Stream:
    """The exchange of one model's gradients under whatever else goes on.

    Args:
        ended: called with each step's number, and the seconds its exchange held up the training, in all and waiting.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: list[FlatBuffer],
        state: CompressionState,
        ended: Ended,
    ) -> None:
        self._optimizer, self._transport, self._ended = optimizer, state.world.transport, ended
        self._habits = Habits(model, optimizer, state)
        self._sending = Sending(buffers, state)
        self._updates = BucketSteps(optimizer, buffers)
        self._bucket_of = {id(p): b for b in self._sending.buckets for p in b.buffer.parameters}
        self._views = {
            id(p): v for b in buffers for p, v in zip(b.parameters, b.views, strict=True)
        }
        self.step = state.step
        self._unapplied: list[Bucket] = []  # of the last step, in the order they were sent
        self._backward = self._forward = self._seconds = 0.0
        self._caller = threading.get_ident()
        self._touches = Touches(model, self._touch)
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._gradient_made)  # type: ignore[no-untyped-call]
            for p in self._parameters()
        ]
        self._handles.append(optimizer.register_state_dict_pre_hook(lambda _: self.settle()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()))
        optimizer.zero_grad = self._zero_grad  # type: ignore[method-assign]
        self._transport.guard = self._before_call

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for bucket in self._sending.buckets for p in bucket.buffer.parameters)

    # backward

    def _gradient_made(self, parameter: Tensor) -> None:
        """A hook: autograd has added to this parameter's gradient."""
        now, key, gradient = time.perf_counter(), id(parameter), parameter.grad
        bucket = self._bucket_of[key]
        if gradient is None:
            return
        if not self._habits.made:
            self._backward = now
        whole = self._habits.note_made(key)
        if key not in self._touches.seen and bucket.number not in self._habits.apart:
            self._used_apart(bucket)
        if bucket.sent is not None:
            self._refuse("backward added to gradients that were already sent; run all but the last in job.no_sync()")
        if lies_in(gradient, self._views[key]):
            parameter.grad = gradient = gradient.clone()  # the buffer is the exchange's
        bucket.made[key] = (gradient, gradient._version)
        bucket.ready_s = now - self._backward
        if whole:
            bucket.whole.add(key)
            if bucket.is_whole and not self._habits.why_late:
                self._sending.send_whole()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that are made inside are not the last of their step."""
        self._habits.holding = True
        try:
            yield
        finally:
            self._habits.holding = False

    # step

    def before_step(self) -> None:
        """Send what backward has not sent, and leave to the optimiser only what must not wait."""
        begun = time.perf_counter()
        self.settle()
        for bucket in self._sending.buckets:
            if not bucket.unchanged():
                self._habits.changed = True
                if bucket.sent is not None:
                    self._refuse("gradients were changed between backward, which sent them, and step()")
            bucket.whole.update(map(id, bucket.buffer.parameters))
        self._sending.send_whole()
        self._updates.begin()
        for bucket in self._sending.buckets:
            now = bool(self._habits.why_not) or bucket.number in self._habits.apart
            if now:
                self._sending.wait(bucket)
            for parameter in bucket.buffer.parameters:
                parameter.grad = self._views[id(parameter)] if now else None
        self._seconds += time.perf_counter() - begun

    def evaluated(self) -> None:
        """The optimiser has evaluated its closure, and wants the means now: an exchange of its own."""
        self._habits.note_closure()
        self.before_step()
        self._exchanged()

    def after_step(self) -> None:
        """The optimiser has stepped what must not wait: the gradients of the others are means from here on, too."""
        if not self._habits.closures:  # else each evaluation was
            self._exchanged()

    def _exchanged(self) -> None:
        begun = time.perf_counter()
        habits, sending = self._habits, self._sending
        later = [] if habits.why_not else [number for number in sending.order if number not in habits.apart]
        self._unapplied = [self._sending.buckets[number] for number in later]
        for bucket in self._sending.buckets:
            bucket.touched = False
            if bucket not in self._unapplied:
                bucket.reset()
            for parameter in bucket.buffer.parameters:
                parameter.grad = self._views[id(parameter)]
        habits.end_step(len(sending.buckets))
        if habits.steps in REORDERED:
            sending.reorder()
        self._touches.seen.clear()
        self._forward = 0.0
        self.step += 1
        self._sending.begin(self.step)
        self._seconds += time.perf_counter() - begun
        if not self._unapplied:
            self._step_ended()

    # the next forward

    def _touch(self, parameter: Tensor) -> None:
        """Somebody takes this parameter from its module: it is to be up to date."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or bucket.touched or threading.get_ident() != self._caller:
            return
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
        self._updates.apply(bucket.number)
        self._unapplied.remove(bucket)
        bucket.reset()
        self._seconds += time.perf_counter() - begun
        if not self._unapplied:
            self._step_ended()

    def settle(self) -> None:
        """Bring all weights up to date."""
        for bucket in list(self._unapplied):
            self._apply(bucket)

    def _used_apart(self, bucket: Bucket) -> None:
        """A gradient came of weights that nobody took from their module in this step."""
        if self._habits.why_not:
            self._habits.apart.add(bucket.number)  # no harm: nothing was put off
        else:
            self._refuse(f"weights of bucket {bucket.number} were used otherwise than through their modules")

    def restart(self, step: int) -> None:
        """Go on with step number `step`, all weights being up to date."""
        self.step = step
        self._sending.begin(step)

    def _step_ended(self) -> None:
        step = self.step - 1
        seconds, self._seconds = self._seconds, 0.0
        waited_s, self._sending.waited_s = self._sending.waited_s, 0.0
        self._ended(step, seconds, waited_s)

    def _zero_grad(self, set_to_none: bool = True) -> None:
        if not set_to_none:
            self.settle()  # or it would zero what is under way
        type(self._optimizer).zero_grad(self._optimizer, set_to_none)

    def _before_call(self) -> None:
        """The training thread is about to use the transport, which the exchange thread has to itself until then."""
        if threading.get_ident() == self._caller:
            self._sending.wait_all()

    def _refuse(self, text: str) -> NoReturn:
        error = BadInput(f"step {self.step}: {text}; or give overlap=False")
        self._sending.fail(error)
        raise error

    def explain(self) -> str:
        """What is hidden, and why the rest is not."""
        return f"{self._habits.explain()}\nbuckets are sent in the order {', '.join(map(str, self._sending.order))}"

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
            vars(self._optimizer).pop("zero_grad", None)
            self._transport.guard = None
            self._sending.close()

