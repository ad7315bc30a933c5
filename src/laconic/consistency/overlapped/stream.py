"""Gradients that are sent as backward makes them, and applied when the next forward needs their weights.

Caller: synchronous `distribute`. The road of a bucket: its last gradient is made (a hook) and it is copied into the
bucket's buffer. The exchange thread averages it while backward goes on. `step()` puts down the optimiser's settings and
returns. The first touch of one of its weights waits for the mean and takes the bucket's part of the step. Every forward
sees the bits it would see without all this: only the time at which things happen is another.

The first steps are watched, and nothing overlaps in them: how often backward runs before a step, whether gradients are
changed between backward and step (clipping), whether weights are used otherwise than through their modules. What cannot
be hidden is left as it was, and `explain()` says why. A later step that is not like those is refused where gradients
were under way already, before it has changed any weight.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn

from laconic.consistency.overlapped.sending import Bucket, Sending
from laconic.consistency.overlapped.touch import Touches
from laconic.consistency.overlapped.updates import BucketSteps, why_whole
from laconic.errors import BadInput
from laconic.exchange.layout import FlatBuffer, lies_in
from laconic.exchange.state import CompressionState

WATCHED = 2  # steps before anything overlaps
REORDERED = (WATCHED, 10, 50)  # after so many steps the order of buckets is agreed on anew
Ended = Callable[[int, float, float], None]


class Stream:
    """The exchange of one model's gradients under whatever else goes on.

    Args:
        ended: called with each step's number, and the seconds its exchange held up the training, in all and waiting.

    Attributes:
        why_not: why updates are taken in `step()`; empty where they may wait for the next forward.
        why_late: why gradients are sent only in `step()`; empty where backward sends them.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: list[FlatBuffer],
        state: CompressionState,
        ended: Ended,
    ) -> None:
        self._model, self._optimizer, self._state, self._ended = model, optimizer, state, ended
        self._sending = Sending(buffers, state)
        self._updates = BucketSteps(optimizer, buffers)
        self._bucket_of = {id(p): b for b in self._sending.buckets for p in b.buffer.parameters}
        self._views = {
            id(p): v for b in buffers for p, v in zip(b.parameters, b.views, strict=True)
        }
        self.step = state.step
        self.why_not = self.why_late = f"the first {WATCHED} steps are watched"
        self._unapplied: list[Bucket] = []  # of the last step, in the order they were sent
        self._eager: set[int] = set()  # buckets with weights that are used otherwise than through their modules
        self._made: dict[int, int] = {}  # how often each parameter's gradient was made in this step
        self._expected: dict[int, int] = {}  # the most often it was in one before
        self._changed = self._holding = self._held = self._evaluated = False
        self._watched = 0
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
        state.world.transport.guard = self._before_call

    def _parameters(self) -> Iterator[nn.Parameter]:
        return (p for bucket in self._sending.buckets for p in bucket.buffer.parameters)

    # backward

    def _gradient_made(self, parameter: Tensor) -> None:
        """A hook: autograd has added to this parameter's gradient."""
        now, key, gradient = time.perf_counter(), id(parameter), parameter.grad
        bucket = self._bucket_of[key]
        if gradient is None:
            return
        if not self._made:
            self._backward = now
        self._made[key] = self._made.get(key, 0) + 1
        if key not in self._touches.seen and bucket.number not in self._eager:
            self._used_apart(bucket)
        if bucket.sent is not None:
            self._refuse("backward added to gradients that were already sent; run all but the last in job.no_sync()")
        if lies_in(gradient, self._views[key]):
            parameter.grad = gradient = gradient.clone()  # the buffer is the exchange's
        bucket.made[key] = (gradient, gradient._version)
        bucket.ready_s = now - self._backward
        if not self._holding and (self._held or self._made[key] == self._expected.get(key)):
            bucket.whole.add(key)
            if bucket.is_whole and not self.why_late:
                self._sending.send_whole()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients that are made inside are not the last of their step."""
        self._holding = self._held = True
        try:
            yield
        finally:
            self._holding = False

    # step

    def before_step(self) -> None:
        """Send what backward has not sent, and leave to the optimiser only what must not wait."""
        begun = time.perf_counter()
        self.settle()
        for bucket in self._sending.buckets:
            if not bucket.unchanged():
                self._changed = True
                if bucket.sent is not None:
                    self._refuse("gradients were changed between backward, which sent them, and step()")
            bucket.whole.update(map(id, bucket.buffer.parameters))
        self._sending.send_whole()
        self._updates.begin()
        for bucket in self._sending.buckets:
            now = bool(self.why_not) or bucket.number in self._eager
            if now:
                self._sending.wait(bucket)
            for parameter in bucket.buffer.parameters:
                parameter.grad = self._views[id(parameter)] if now else None
        self._seconds += time.perf_counter() - begun

    def evaluated(self) -> None:
        """The optimiser has evaluated its closure, and wants the means now: an exchange of its own."""
        self._evaluated = True
        self.why_not = self._why_kept()
        self.before_step()
        self._exchanged()

    def after_step(self) -> None:
        """The optimiser has stepped what must not wait: the gradients of the others are means from here on, too."""
        if not self._evaluated:  # else each evaluation was
            self._exchanged()

    def _exchanged(self) -> None:
        begun = time.perf_counter()
        later = [] if self.why_not else [n for n in self._sending.order if n not in self._eager]
        self._unapplied = [self._sending.buckets[number] for number in later]
        for bucket in self._sending.buckets:
            bucket.touched = False
            if bucket not in self._unapplied:
                bucket.reset()
            for parameter in bucket.buffer.parameters:
                parameter.grad = self._views[id(parameter)]
        self._learn()
        self._touches.seen.clear()
        self._made, self._held, self._forward = {}, False, 0.0
        self.step += 1
        self._sending.begin(self.step)
        self._seconds += time.perf_counter() - begun
        if not self._unapplied:
            self._step_ended()

    def _learn(self) -> None:
        """What this step was like; overlapping begins when enough have been watched."""
        for key, times in self._made.items():
            self._expected[key] = max(times, self._expected.get(key, 0))
        self._watched += 1
        auto = self._state.auto
        if auto is not None and not auto.settled:
            self.why_not = self.why_late = "codec auto still measures"
        elif self._watched >= WATCHED:
            self.why_late = "gradients are changed between backward and step()" if self._changed else ""
            self.why_not = why_whole(self._optimizer) or self._why_kept()
            if self._watched in REORDERED:
                self._sending.reorder()

    def _why_kept(self) -> str:
        """Why updates cannot wait for the next forward, whatever the optimiser; empty where they can."""
        if self._evaluated:
            return "the optimiser evaluates a closure"
        if self._state.choice.names("factors"):
            return "codec factors looks at the forward that makes a gradient"
        if any(hasattr(module, "_orig_mod") or module._compiled_call_impl for module in self._model.modules()):
            return "a compiled module does not ask for its weights one by one"
        if len(self._eager) == len(self._sending.buckets):
            return "all weights are used otherwise than through their modules"
        return ""

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
        if self.why_not:
            self._eager.add(bucket.number)  # no harm: nothing was put off
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
        sent = f"are sent in step(): {self.why_late}" if self.why_late else "are sent as backward makes them"
        late = f"is waited for in step(): {self.why_not}" if self.why_not else "is taken when the next forward needs it"
        eager = f"\n{len(self._eager)} buckets are not put off: {_APART}" if self._eager and not self.why_not else ""
        order = ", ".join(map(str, self._sending.order))
        return f"gradients {sent}\na bucket's update {late}{eager}\nbuckets are sent in the order {order}"

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
            self._state.world.transport.guard = None
            self._sending.close()


_APART = "their weights are used otherwise than through their modules"
