"""Synchronous training: every step applies the mean of all workers' gradients, through any codec.

Callers: `distribute(consistency="sync")`. All workers see the same weights in every forward. With overlap=False
communication happens in `optimizer.step()`. Otherwise it overlaps with backward and the next forward where it can, to
the same bits: `StepSink` brings gradients to the stream as backward makes them (`exchange/stream.py`). `step()`
saves the optimiser's settings and returns. The first touch of a weight waits for its bucket's mean and takes the
bucket's part of the step (`late_updates.py`). The first steps show what the loop allows to overlap. A later step that
breaks this pattern raises an error if its gradients were already under way, before any weight has changed.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, ClassVar, NoReturn

import torch
from torch import Tensor, nn

from laconic.consistency.averaging import (
    average_gradients,
    exchange_of,
    lay_out,
    send_buffers,
    start_alike,
    trained_parameters,
)
from laconic.consistency.backup_workers import BackupAgreement
from laconic.consistency.base import EXCHANGE_OPTIONS, Agreement, Mode, Setup, register
from laconic.consistency.late_updates import BucketSteps, Habits, Made, Touches, are_still
from laconic.errors import BadInput, LaconicError
from laconic.exchange.job import StepRecord
from laconic.exchange.layout import FlatGradients, lies_in, places_in, write
from laconic.exchange.newcomers import announce, average
from laconic.exchange.state import CompressionState
from laconic.exchange.stream import Bucket
from laconic.storage.form import check_like

Ended = Callable[[int, float, float], None]


class ExchangedGradients(Agreement):
    """Agreements whose gradients are averaged in `step()`, through the exchange: all (sync) or a trunk's (treenet).

    Attributes:
        state: the exchange's state: records, residuals, codec plan.
        gradients: the flat buffers the gradients lie in.
    """

    def __init__(self, setup: Setup) -> None:
        self.state = exchange_of(setup)
        self._follow = not self.overlaps(setup)
        self.gradients = self.lay_out(self.exchanged(setup))
        super().__init__(setup)
        self.resources.callback(self.state.close)
        self.resources.callback(lambda: self.gradients.close())

    def lay_out(self, parameters: list[nn.Parameter]) -> FlatGradients:
        """Flat buffers for the gradients of these parameters."""
        return lay_out(self.state, parameters, follow=self._follow)

    def overlaps(self, setup: Setup) -> bool:
        """Whether the exchange goes on beside backward and forward."""
        return False

    def exchanged(self, setup: Setup) -> list[nn.Parameter]:
        """The parameters whose gradients are averaged."""
        return trained_parameters(setup.model, setup.optimizer)

    def before_step(self) -> None:
        begun, step = time.perf_counter(), self.state.step
        wait_s = sum(record.wait_s for record in average_gradients(self.state, self.gradients))
        self.exchanged_step(step, time.perf_counter() - begun, wait_s)

    def exchanged_step(self, step: int, seconds: float, wait_s: float) -> None:
        """Keep the record of a step whose gradients have all been exchanged."""
        sent_nbytes = sum(record.sent_nbytes for record in list(self.state.buckets.records) if record.step == step)
        self.records.append(StepRecord(step, seconds, wait_s, sent_nbytes, staleness=0))

    def explain(self) -> str:
        return self.state.explain()

    def report_loss(self, loss: float) -> None:
        self.state.report_loss(loss)

    def metrics(self) -> dict[str, float | str]:
        found = {**self.state.metrics(), **super().metrics()}
        if "busy_s" in found:  # means are waited for where they are needed, up to the next forward
            for end in ("", "_median"):
                found[f"hidden_s{end}"] = max(0.0, float(found[f"busy_s{end}"]) - float(found[f"wait_s{end}"]))
        return found

    def state_dict(self) -> dict[str, Any]:
        return {**self.state.state_dict(), "steps": self.step}

    def check_state(self, state: Mapping[str, Any]) -> None:
        self.state.check_state(state)
        check_like(state, {"steps": 0}, "the state of the gradients")

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.check_state(state)
        self.state.load_state_dict(dict(state))
        self.step = int(state["steps"])  # with closures, several exchanges are one step
        self.hooks.loaded()


@register("sync")
@dataclass(frozen=True)
class Sync(Mode):
    """Every step waits for the mean of all workers' gradients; the weights stay the same bits everywhere.

    Args:
        drop_slowest: how many workers a step does not wait for (BackupAgreement); gradients are then sent as they are.
    """

    drop_slowest: int = 0

    summary: ClassVar[str] = "every step waits for the mean of all gradients"
    examples: ClassVar[tuple[str, ...]] = ("sync", "sync(drop_slowest=1)")
    options: ClassVar[tuple[str, ...]] = (*EXCHANGE_OPTIONS, "overlap")

    def __post_init__(self) -> None:
        if self.drop_slowest < 0:
            raise BadInput(f"drop_slowest is a number of workers, got {self.drop_slowest}")

    @property
    def no_codec(self) -> str:
        return "it sends gradients as they are" if self.drop_slowest else ""

    @property
    def repeatable(self) -> bool:
        return not self.drop_slowest  # whose gradients come first is a matter of chance

    @property
    def lead(self) -> int:
        return 2  # the exchange of a step may end in the forward of the next

    @property
    def shares_buffers(self) -> bool:
        return not self.drop_slowest

    def outlives(self, rank: int, world_size: int) -> bool:
        return self.drop_slowest > 0 and rank != 0  # which sums

    def install(self, setup: Setup) -> Agreement:
        if self.drop_slowest:
            setup.options.refuse(str(self))
            return BackupAgreement(setup, self.drop_slowest)
        return SyncAgreement(setup)


class SyncAgreement(ExchangedGradients):
    """Sync at work."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        start_alike(setup.model, setup.world)
        self.state.observe(setup.model)
        self._newcomers: dict[str, nn.Parameter] = {}  # of this step
        self.sink = self._new_sink() if self.overlaps(setup) else None
        self.resources.callback(lambda: None if self.sink is None else self.sink.close())

    def overlaps(self, setup: Setup) -> bool:
        return setup.options.overlap is not False and setup.world.world_size > 1

    @property
    def closures(self) -> bool:
        return True

    def _new_sink(self) -> StepSink:
        return StepSink(self.model, self.optimizer, self.gradients, self.state, self.exchanged_step)

    def before_step(self) -> None:
        if self.sink is None:
            super().before_step()
        else:
            self.sink.before_step()
        self._admit()

    def after_step(self) -> None:
        if self.sink is not None:
            self.sink.after_step()
        self._settle_in()

    def evaluated(self) -> None:
        if self.sink is None:
            super().before_step()
        else:
            self.sink.evaluated()
        self._admit()

    def _admit(self) -> None:
        """Average the gradients of parameters that were frozen, or not the optimiser's, until this step."""
        trained = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        if strangers := {id(p) for p in trained if not self.gradients.holds(p)}:
            named = {name: p for name, p in self.model.named_parameters() if id(p) in strangers}
            if unknown := len(strangers) - len(named):
                raise BadInput(f"the optimiser trains {unknown} parameters that are not the model's")
            if not self.alone:
                if not self._newcomers:
                    announce(named, self.world)
                average(list(named.values()), self.world)
            self._newcomers = named

    def _settle_in(self) -> None:
        """From the next step on, put newly trained parameters into buckets and through the codec."""
        if self._newcomers:
            if self.sink is not None:
                self.sink.close()
            self.gradients.close()
            self.state.buckets.parameters.add(self._newcomers.items())
            self.state.load_state_dict(self.state.state_dict())  # which lays out residuals anew
            self.gradients = self.lay_out(trained_parameters(self.model, self.optimizer))
            self.sink = None if self.sink is None else self._new_sink()
            self._newcomers = {}

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients, as DDP's `no_sync`: run all backwards of a step but the last inside."""
        return nullcontext() if self.sink is None else self.sink.no_sync()

    def settle_weights(self) -> None:
        """Bring all weights up to date."""
        if self.sink is not None:
            self.sink.settle()

    def report_loss(self, loss: float) -> None:
        self.settle_weights()  # so that the step's review is over, and the next one takes it on all ranks
        super().report_loss(loss)

    def finish(self) -> None:
        """Bring all weights up to date; buffers become rank 0's, as in DDP."""
        self.settle_weights()
        if not self.alone:
            with self.agreeing():
                send_buffers(self.model, self.world)
            self.settle_finish()

    def explain(self) -> str:
        return self.state.explain("" if self.sink is None else self.sink.explain())

    def state_dict(self) -> dict[str, Any]:
        if self.sink is not None:
            self.sink.check_between()
        self.settle_weights()
        return super().state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.settle_weights()
        super().load_state_dict(state)
        if self.sink is not None:
            self.sink.restart(self.state.step)


class StepSink:
    """The optimiser's step as a sink: gradients leave under backward, and updates wait for the next forward.

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
        self._transport, self._ended, self._stream = state.world.transport, ended, state.stream
        self._habits = Habits(model, optimizer, state)
        section_nbytes = state.buckets.section_nbytes
        self._buckets = [Bucket(i, b.parameters, b, section_nbytes) for i, b in enumerate(gradients.buffers)]
        self._stream.use(self._buckets, self._fill, shares_messages=False)
        self.waits = self._stream.waits
        self._updates = BucketSteps(optimizer, gradients.buffers)
        self._bucket_of = {id(p): bucket for bucket in self._buckets for p in bucket.parameters}
        self._views = places_in(gradients.buffers)
        self._made: dict[int, Made] = {}  # gradients of this step as backward left them, by parameter
        self._versions: dict[int, int] = {}  # of the weights that the next update is for, by parameter
        self._touched: set[int] = set()  # numbers of buckets with weights that somebody has asked for
        self._unapplied: list[Bucket] = []  # of the last step, in the order they were sent
        self._evaluated = False  # in this step, by a closure
        self._forward = self._seconds = 0.0
        self._lock = threading.RLock()  # whoever touches a weight may take its bucket's step
        self._trainer = threading.get_ident()  # the thread of the loop, whose the gradients are
        self._touches = Touches(model, self._touch)
        self._handles: list[Any] = [
            p.register_post_accumulate_grad_hook(self._gradient_made)
            for bucket in self._buckets
            for p in bucket.parameters
        ]
        self._handles.append(optimizer.register_state_dict_pre_hook(lambda _: self.settle()))
        self._handles.append(optimizer.register_load_state_dict_pre_hook(lambda *_: self.settle()))
        self._stream.begin(state.step)
        self._guard = weakref.WeakMethod(self._before_call)
        self._transport.guards.append(self._guard)

    # backward

    def _gradient_made(self, parameter: Tensor) -> None:
        """A hook: autograd has added to this parameter's gradient."""
        now, key, gradient, habits = time.perf_counter(), id(parameter), parameter.grad, self._habits
        bucket = self._bucket_of[key]
        if gradient is None:
            return
        if key not in habits.made and (lies_in(gradient, self._views[key]) or hasattr(gradient, _OLD)):
            self._note_kept()
        whole = habits.note_made(key)
        if key not in self._touches.seen and bucket.number not in habits.apart:
            self._note_apart(bucket)
        if bucket.sent:
            made = self._made.get(key)
            self._refuse(_AGAIN if made is not None and made.gradient is gradient else _SKIPPED)
        if lies_in(gradient, self._views[key]):
            parameter.grad = gradient = gradient.clone()  # the buffer is the exchange's
        self._made[key] = Made.of(gradient, watched=habits.watching)
        self._stream.note_time(bucket, now)
        if whole:
            bucket.missing.discard(key)
            if not bucket.missing and not habits.why_late:
                self._stream.send_ready()

    def _fill(self, bucket: Bucket) -> None:
        """Copy the gradients into the bucket's buffer; zeros for gradients that only other ranks have made."""
        assert bucket.buffer is not None  # as all of these have
        bucket.buffer.check()
        for parameter, view in zip(bucket.parameters, bucket.buffer.views, strict=True):
            if parameter.grad is None or not lies_in(parameter.grad, view):
                write(parameter.grad, view)

    def _unchanged(self, bucket: Bucket) -> bool:
        """Whether the gradients are still what backward left."""
        for parameter in bucket.parameters:
            gradient, made = parameter.grad, self._made.get(id(parameter))
            if not (gradient is None if made is None else made.is_still(gradient)):
                return False
        return are_still([made for p in bucket.parameters if (made := self._made.get(id(p))) is not None])

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients made inside; may be nested."""
        self._habits.holding += 1
        try:
            yield
        finally:
            self._habits.holding -= 1

    # step

    def before_step(self) -> None:
        """Send the gradients that backward has not sent; leave to the optimiser only the updates that cannot wait."""
        begun = time.perf_counter()
        self.settle()
        for bucket in self._buckets:
            if not self._unchanged(bucket):
                self._habits.changed = True
                if bucket.sent:
                    self._refuse("gradients were changed between backward, which sent them, and step()")
            bucket.missing.clear()
        self._stream.send_ready()
        self._habits.look_at_optimizer()
        self._updates.begin()
        for bucket in self._buckets:
            now = self._steps_now(bucket)
            if now:
                self._stream.wait(bucket)
            for parameter in bucket.parameters:
                parameter.grad = self._views[id(parameter)] if now else None
        self._seconds += time.perf_counter() - begun

    def _steps_now(self, bucket: Bucket) -> bool:
        return bool(self._habits.why_not) or bucket.number in self._habits.apart

    def evaluated(self) -> None:
        """Average now, in an exchange of its own: the optimiser has evaluated its closure."""
        self._habits.note_closure()
        self._evaluated = True
        self.before_step()
        self._exchanged()

    def after_step(self) -> None:
        """Finish the step, after the optimiser has made the updates that cannot wait."""
        if not self._evaluated:  # else each evaluation was
            self._exchanged()
        self._evaluated = False

    def _exchanged(self) -> None:
        """Leave the updates to the next access of the weights, which may come from another thread."""
        with self._lock:
            begun, stream = time.perf_counter(), self._stream
            self._trainer = threading.get_ident()
            self._unapplied = [bucket for bucket in stream.in_order() if not self._steps_now(bucket)]
            for bucket in self._unapplied:
                for parameter in bucket.parameters:
                    if (made := self._made.get(id(parameter))) is not None:
                        setattr(made.gradient, _OLD, True)
                        parameter.grad = made.gradient  # this rank's own: the mean may still be under way
            self._made.clear()
            self._touched.clear()
            self._versions = {id(p): p._version for bucket in self._buckets for p in bucket.parameters}
            for bucket in self._buckets:
                if bucket not in self._unapplied:
                    bucket.forget()
            self._habits.end_step(len(self._buckets))
            stream.end_step()
            self._touches.seen.clear()
            self._forward = 0.0
            stream.begin(stream.step + 1)
            self._seconds += time.perf_counter() - begun
            if not self._unapplied:
                self._step_ended()

    def restart(self, step: int) -> None:
        """Go on with step number `step`."""
        self._stream.begin(step)

    # the next forward

    def _touch(self, parameter: Tensor) -> None:
        """Bring this parameter up to date: it is being read from its module."""
        bucket = self._bucket_of.get(id(parameter))
        if bucket is None or bucket.number in self._touched or self._stream.on_thread():
            return
        with self._lock:
            now = time.perf_counter()
            self._forward = self._forward or now
            bucket.needed_s = now - self._forward
            if bucket in self._unapplied:
                self._apply(bucket)
                self._forward += time.perf_counter() - now  # what it takes is no part of the forward
            self._touched.add(bucket.number)

    def _apply(self, bucket: Bucket) -> None:
        begun = time.perf_counter()
        self._stream.wait(bucket)
        if any(self._versions[id(parameter)] != parameter._version for parameter in bucket.parameters):
            self._refuse(f"weights of bucket {bucket.number} were changed before their update had come")
        try:
            self._updates.apply(bucket.number)
        except BaseException as error:
            text = f"the update of bucket {bucket.number} was broken off by {type(error).__name__}: {error}"
            self._stream.fail(LaconicError(f"step {self._stream.step - 1}: {text}; go on from a checkpoint"))
            raise
        for parameter in bucket.parameters if threading.get_ident() == self._trainer else ():
            if hasattr(parameter.grad, _OLD):  # nobody has reset it, nor can another thread now: it can be the mean
                parameter.grad = self._views[id(parameter)]
        self._unapplied.remove(bucket)
        bucket.forget()
        self._seconds += time.perf_counter() - begun
        if not self._unapplied:
            self._step_ended()

    def settle(self) -> None:
        """Bring all weights up to date."""
        with self._lock:
            for bucket in list(self._unapplied):
                self._apply(bucket)

    def check_between(self) -> None:
        """Refuse a call that is valid only between two steps: backward has sent gradients that no step has applied."""
        if any(bucket.sent and bucket not in self._unapplied for bucket in self._buckets):
            text = "backward has sent gradients of it already; save before backward, or after step()"
            raise BadInput(f"step {self._stream.step} is under way: {text}")

    def _note_kept(self) -> None:
        """Note a gradient that was not None when backward began."""
        self._habits.kept = True
        if not self._habits.why_not:
            self._refuse("gradients were not set to None since the last step, whose means they should be by now")

    def _note_apart(self, bucket: Bucket) -> None:
        """Note a gradient of weights that were not read from their module in this step."""
        if not self._habits.why_not:
            self._refuse(f"weights of bucket {bucket.number} were used otherwise than through their modules")
        self._habits.apart.add(bucket.number)  # no harm: nothing was put off

    def _step_ended(self) -> None:
        seconds, self._seconds = self._seconds, 0.0
        waited_s, self._stream.waited_s = self._stream.waited_s, 0.0
        self._ended(self._stream.step - 1, seconds, waited_s)

    def _before_call(self) -> None:
        """Wait until the exchange thread is idle: another caller is about to use the transport."""
        if not self._stream.on_thread():
            self._habits.called = self._habits.called or bool(self._habits.made)
            self._stream.wait_all()

    def _refuse(self, text: str) -> NoReturn:
        error = BadInput(f"step {self._stream.step}: {text}; or give overlap=False")
        self._stream.fail(error)
        raise error

    def explain(self) -> str:
        """Say what overlaps, and why the rest does not."""
        return f"{self._habits.explain()}\nsections are sent in the order {', '.join(map(str, self._stream.order))}"

    def close(self) -> None:
        """Bring all weights up to date and remove the hooks; raise a pending error after that."""
        try:
            self.settle()
            self._stream.wait_all()
        finally:
            self._unapplied = []
            self._touches.close()
            for handle in self._handles:
                handle.remove()
            if self._guard in self._transport.guards:
                self._transport.guards.remove(self._guard)


_OLD = "_laconic_of_an_earlier_step"  # the attribute of a gradient that has been exchanged
_AGAIN = "backward added to gradients that were already sent; run all but the last in job.no_sync()"
_SKIPPED = "backward ran again, and gradients that were already sent were never applied: no step may be left out"
