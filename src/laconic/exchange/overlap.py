"""Beside backward: a step's buckets as they come, held until they make a message, then off to the exchange thread.

Callers: the DDP hook, by `state.py`. Exact buckets take the float32 shortcut where it is open. The first error is kept
until backward ends: DDP would make a RuntimeError of it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from torch import Tensor

from laconic.exchange.chooser import AutoCodec
from laconic.exchange.exchange_thread import ThreadShare
from laconic.exchange.layout import Gradients
from laconic.exchange.options import PlannedCodec
from laconic.transports.base import Transport
from laconic.transports.rounds import Pausing
from laconic.transports.world import World

_log = logging.getLogger("laconic.exchange")


class Failure:
    """What went wrong first, if anything did; a bucket that was under way too fails because of the first."""

    def __init__(self) -> None:
        self._error: Exception | None = None

    def note(self, error: Exception) -> None:
        """Keep the first error."""
        if self._error is None:
            self._error = error
            _log.error("the exchange of gradients failed: %s: %s", type(error).__name__, error)

    def __bool__(self) -> bool:
        return self._error is not None

    def marked(self, buffer: Tensor) -> Tensor:
        """The buffer; of NaN after a failure: whoever steps all the same, steps nowhere unnoticed."""
        return buffer.fill_(float("nan")) if self else buffer

    def raise_first(self) -> None:
        """Raise what went wrong, if anything did."""
        if self._error is not None:
            raise self._error


class Float32Shortcut:
    """Which buckets went as float32, all ranks in the same call, and whether this step may go so too."""

    def __init__(self) -> None:
        self._layouts: dict[int, object] = {}
        self._open = False

    def begin_step(self, *, possible: bool) -> None:
        """Open or close the shortcut for a step."""
        self._open = possible

    def takes(self, gradients: Gradients) -> bool:
        """Whether this bucket goes by the shortcut."""
        self._open = self._open and self._layouts.get(gradients.index) == gradients.layout
        return self._open

    def note(self, gradients: Gradients, *, plain: bool) -> None:
        """Remember whether this bucket went as float32, with no residual left."""
        self._layouts.pop(gradients.index, None)
        if plain:
            self._layouts[gradients.index] = gradients.layout

    def clear(self) -> None:
        """Forget all buckets."""
        self._layouts.clear()

    @staticmethod
    def submit(
        gradients: Gradients,
        transport: Transport,
        done: Callable[[Gradients, float], None],
        failed: Callable[[Exception], None],
    ) -> Any:
        """Start the engine's all-reduce; returns a future of the mean. `done` is told how many seconds it took."""
        begun, buffer = time.perf_counter(), gradients.buffer

        def finish(future: Any) -> Tensor:
            try:
                future.value()
            except RuntimeError as error:
                failed(transport.explain(error))  # type: ignore[attr-defined]
                return buffer.fill_(float("nan"))
            buffer.div_(transport.world_size)
            done(gradients, time.perf_counter() - begun)
            return buffer

        return transport.native_future(buffer).then(finish)


class Exchanger(Protocol):
    """Whose buckets these are."""

    choice: PlannedCodec | AutoCodec

    @property
    def world(self) -> World: ...

    def steps(self, held: list[Gradients]) -> Pausing[bool]:
        """Average these buckets together; returns whether they went as float32, in place."""

    def went_plain(self, gradients: Gradients, seconds: float) -> None:
        """Record a bucket that took the shortcut."""


class Overlap:
    """The buckets of the step that is under way.

    Args:
        message_nbytes: buckets are held until their payloads make this much together, or the step's last has come.
    """

    def __init__(self, message_nbytes: int) -> None:
        self.failure = Failure()
        self._message_nbytes = message_nbytes
        self._shortcut = Float32Shortcut()
        self._thread: ThreadShare | None = None
        self._held: list[Gradients] = []

    def submit(self, gradients: Gradients, owner: Exchanger) -> Any:
        """Start the exchange of one bucket, or hold it; returns a future of its buffer."""
        if gradients.index == 0:
            self._begin_step(gradients, owner)
        if self._shortcut.takes(gradients):
            return self._shortcut.submit(gradients, owner.world.transport, owner.went_plain, self.failure.note)
        if self._held and not owner.choice.alike(gradients.index, self._held[0].index, gradients.step):
            self._let_go(owner)
        self._held.append(gradients)
        if gradients.last or not self._may_hold(owner):
            self._let_go(owner)
        return gradients.future

    def _begin_step(self, gradients: Gradients, owner: Exchanger) -> None:
        """Forget a backward that did not end, and decide whether the float32 shortcut is open."""
        self._held = []
        transport = owner.world.transport
        if self._thread is None:
            self._thread = ThreadShare(transport)
        quiet = transport.has_futures and self._thread.alone and not self.failure
        self._shortcut.begin_step(possible=quiet and _is_exact(owner.choice, gradients.step))

    def _may_hold(self, owner: Exchanger) -> bool:
        """Whether what is held is too little for a message of its own."""
        try:
            chosen = owner.choice.codec_for(self._held[0].index, self._held[0].step)
        except Exception:  # the user's function failed: it will again, on the exchange thread, which reports it
            return False
        if chosen.kind == "matrix" or chosen.exact:
            return False
        return sum(chosen.max_nbytes(held.buffer.numel()) for held in self._held) < self._message_nbytes

    def _let_go(self, owner: Exchanger) -> None:
        held, self._held = self._held, []
        assert self._thread is not None  # since the step's first bucket
        self._thread.submit(lambda: self._attempt(held, owner))

    def _attempt(self, held: list[Gradients], owner: Exchanger) -> Pausing[None]:
        """The exchange; after an error the other ranks are told, and the gradients become NaN."""
        try:
            if not self.failure:
                plain = yield from owner.steps(held)
                for each in held:
                    self._shortcut.note(each, plain=plain)
        except Exception as error:
            self.failure.note(error)
            owner.world.transport.abandon(f"{type(error).__name__}: {error}")
        finally:
            for each in held:
                each.future.set_result(self.failure.marked(each.buffer))

    def restart(self) -> None:
        """Forget what earlier steps were like."""
        self._shortcut.clear()

    def close(self) -> None:
        """Join the exchange thread, unless others use it; safe to call twice."""
        if self._thread is not None:
            self._thread.close()
            self._thread = None


def _is_exact(choice: PlannedCodec | AutoCodec, step: int) -> bool:
    """Whether all buckets of a step are exact, and nothing is to be decided before it."""
    try:
        return not choice.wants(step) and choice.is_exact(step)
    except Exception:  # the user's function failed: it will again, on the exchange thread, which reports it
        return False
