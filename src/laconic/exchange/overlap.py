"""Beside backward: a step's buckets as they come, held until they make a message, then off to the exchange thread.

Caller: the DDP hook. The first error is kept until backward ends: DDP would make a RuntimeError of it.

A bucket that no codec touches goes by the engine's own future, without the exchange thread: the float32 shortcut. gloo
matches its own all-reduces by their order, so they must all come from one thread: the shortcut is open for a step only
when all its buckets are exact, as in a step before, and nobody else uses the transport. Once a bucket is unlike the
last time, it and those after it go by the exchange thread.

Invariant: every future that DDP is given is set. What is under way ends by the transport's time-out, in data or an
error, and a bucket that is held for one that does not come is given up after as long, by the exchange thread when idle.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from laconic.errors import CollectiveTimeout
from laconic.exchange.former import FormerBuckets
from laconic.exchange.layout import Gradients
from laconic.exchange.options import CodecChoice
from laconic.exchange.thread import ThreadShare
from laconic.transports.base import Pausing
from laconic.transports.world import World

_log = logging.getLogger("laconic.exchange")


class Exchanger(Protocol):
    """Whose buckets these are."""

    choice: CodecChoice
    step: int

    @property
    def world(self) -> World: ...

    @property
    def message_nbytes(self) -> int: ...

    def steps(self, held: list[Gradients]) -> Pausing[bool]: ...

    def went_plain(self, gradients: Gradients, begun: float) -> None: ...


class Overlap:
    """The buckets of the step under way, held until they make a message's bytes together, or the last has come."""

    def __init__(self) -> None:
        self._error: Exception | None = None
        self._plain: dict[int, object] = {}  # layouts of buckets that went as float32, all ranks in the same call
        self._shortcut = False
        self._thread: ThreadShare | None = None
        self._lock = threading.Lock()  # of what is held
        self._held: list[Gradients] = []
        self._overdue: Callable[[], CollectiveTimeout | None] = lambda: None  # why to hold no longer
        self._given_up: CollectiveTimeout | None = None  # in this step
        self._former: FormerBuckets | None = None  # which the next step is exchanged in

    def submit(
        self, owner: Exchanger, buffer: Tensor, index: int, parameters: Sequence[Tensor], *, last: bool
    ) -> Any:
        """Start the exchange of one bucket, or hold it for the next one's messages; returns a future of its buffer."""
        owner.choice.note_ready(index, owner.step)
        gradients = Gradients(buffer, index, parameters, owner.step, last, torch.futures.Future(), index == 0)
        if index == 0:
            self._begin_step(owner)
        self._shortcut = self._shortcut and self._plain.get(index) == gradients.layout
        if self._shortcut:
            return self._take_shortcut(gradients, owner)
        with self._lock:
            if self._given_up is not None:
                self._note(self._given_up)
            if self._former is None:
                self._take(gradients, owner)
            else:
                self._take_as_before(gradients, owner, self._former)
        return gradients.future

    def _take(self, gradients: Gradients, owner: Exchanger) -> None:
        """Let a bucket go, with those that are held or alone, or hold it."""
        if self._held and not self._alike(gradients, owner):
            self._let_go(owner)
        self._held.append(gradients)
        if gradients.last or gradients.buffer.is_sparse or not self._may_hold(owner):
            self._let_go(owner)
        elif len(self._held) == 1:
            self._hold(owner)

    def _take_as_before(self, gradients: Gradients, owner: Exchanger, former: FormerBuckets) -> None:
        """Hold all buckets of a step, and let them go in the former order."""
        self._held.append(gradients)
        if len(self._held) == 1:
            self._hold(owner)
        if gradients.last:
            self._former, whole, self._held = None, self._held, []
            for each in former.arranged(whole):
                self._take(each, owner)

    def _alike(self, gradients: Gradients, owner: Exchanger) -> bool:
        """Whether a bucket may travel with those that are held; sparse ones travel alone."""
        held = self._held[0]
        return not gradients.buffer.is_sparse and owner.choice.alike(gradients.index, held.index, gradients.step)

    def _begin_step(self, owner: Exchanger) -> None:
        """Forget a backward that did not end, and decide whether the float32 shortcut is open."""
        with self._lock:
            self._held, self._given_up = [], None
        transport = owner.world.transport
        if self._thread is None:
            self._thread = ThreadShare(transport, self._look)
        self._shortcut = transport.has_futures and self._thread.alone and self._error is None
        try:
            self._shortcut = self._shortcut and owner.choice.is_exact(owner.step)
        except Exception:  # the user's function failed: it will again, on the exchange thread, which reports it
            self._shortcut = False

    def _take_shortcut(self, gradients: Gradients, owner: Exchanger) -> Any:
        """Start the engine's all-reduce; returns a future of the mean."""
        begun, buffer, transport = time.perf_counter(), gradients.buffer, owner.world.transport

        def finish(future: Any) -> Tensor:
            try:
                future.value()
            except RuntimeError as error:
                self._note(transport.explain(error))  # type: ignore[attr-defined]
                return _spoilt(buffer)
            buffer.div_(transport.world_size)
            owner.went_plain(gradients, begun)
            return buffer

        return transport.native_future(buffer).then(finish)

    def _may_hold(self, owner: Exchanger) -> bool:
        """Whether what is held is too little for a message of its own."""
        try:
            chosen = owner.choice.codec_for(self._held[0].index, self._held[0].step)
        except Exception:  # as above
            return False
        if chosen.kind == "matrix" or chosen.exact:
            return False
        return sum(chosen.max_nbytes(held.buffer.numel()) for held in self._held) < owner.message_nbytes

    def _hold(self, owner: Exchanger) -> None:
        """Wait for the next bucket, no longer than for a message."""
        assert self._thread is not None  # since the step's first bucket
        self._thread.started()
        transport, first = owner.world.transport, self._held[0]
        until = time.monotonic() + transport.timeout_s

        def overdue() -> CollectiveTimeout | None:
            if time.monotonic() < until:
                return None
            where = f"[rank {transport.rank}/{transport.world_size}] step {first.step}"
            text = f"bucket {first.index} is held for the next one, which did not come in {transport.timeout_s:g} s"
            return CollectiveTimeout(f"{where}: {text}: backward has stopped", rank=transport.rank)

        self._overdue = overdue

    def _look(self) -> None:
        """Give up buckets that were held for too long; the step fails if backward goes on after all."""
        with self._lock:
            if self._held and (error := self._overdue()) is not None:
                _log.error("%s", error)
                self._given_up, held, self._held = error, self._held, []
                for each in held:
                    each.future.set_exception(error)

    def _let_go(self, owner: Exchanger) -> None:
        held, self._held = self._held, []
        assert self._thread is not None  # since the step's first bucket
        done = self._thread.submit(lambda: self._attempt(held, owner))
        done.add_done_callback(lambda future: self._answer(held, future))

    def _attempt(self, held: list[Gradients], owner: Exchanger) -> Pausing[None]:
        """The exchange; after an error the other ranks are told, and gradients become NaN: no step goes unnoticed."""
        try:
            if self._error is None:
                plain = yield from owner.steps(held)
                for each in held:
                    self._plain.pop(each.index, None)
                    if plain:
                        self._plain[each.index] = each.layout
        except Exception as error:
            self._note(error)
            owner.world.transport.abandon(f"{type(error).__name__}: {error}")

    def _answer(self, held: list[Gradients], done: Any) -> None:
        """Hand DDP its buckets back, whatever happened on the exchange thread."""
        try:
            done.value()
        except Exception as error:
            self._note(error)
        for each in held:
            each.future.set_result(each.buffer if self._error is None else _spoilt(each.buffer))

    def _note(self, error: Exception) -> None:
        """Keep the first error: a bucket that was under way too fails because of it."""
        if self._error is None:
            self._error = error
            _log.error("the exchange of gradients failed: %s: %s", type(error).__name__, error)

    def raise_first(self) -> None:
        """Raise what went wrong first, if anything did."""
        if self._error is not None:
            raise self._error

    def restart(self, former: FormerBuckets | None = None) -> None:
        """Forget what earlier steps were like; exchange the next one in `former` buckets."""
        self._plain.clear()
        self._former = former

    def close(self) -> None:
        """Join the exchange thread, unless others use it; safe to call twice."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None


def _spoilt(gradients: Tensor) -> Tensor:
    """NaN in place of all gradients."""
    (gradients._values() if gradients.is_sparse else gradients).fill_(float("nan"))
    return gradients
