"""Beside backward: a step's buckets as they come, held until they make a message, then off to the exchange thread.

Caller: `state.py`, for the DDP hook. Exact buckets take the float32 shortcut where it is open.
"""

from __future__ import annotations

from typing import Any, Protocol

from laconic.exchange.chooser import AutoCodec
from laconic.exchange.exchange_thread import ThreadShare
from laconic.exchange.failure import Failure
from laconic.exchange.layout import Gradients
from laconic.exchange.policy import PlannedCodec
from laconic.exchange.shortcut import Float32Shortcut
from laconic.transports.rounds import Pausing
from laconic.transports.world import World


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
