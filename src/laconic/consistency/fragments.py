"""Fragments of a model that workers average in turn, and the one whose mean is under way during training.

Caller: `blocks.py`. A fragment is a run of whole parameters in the model's order, so that it is a slice of the flat
weights. Its mean travels on the transport's exchange thread into memory of its own: weights are only ever written by
the training's thread. So an exchange that fails has changed none of them.
"""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from laconic.codecs.device.streams import let_wait, mark
from laconic.errors import BadInput, CollectiveTimeout
from laconic.exchange.thread import EXCHANGE_THREAD, ThreadShare
from laconic.storage.form import check_like, vector
from laconic.transports.base import Pausing, Transport

WHOLE = slice(None)
MESSAGE_NUMEL = 1 << 20  # values of a bucket of 4 MiB, which is exchanged in two messages a worker at most


@dataclass(frozen=True)
class Fragment:
    """Neighbouring parameters, where they lie in the flat weights, and after which steps of a period they are due."""

    number: int
    parameters: list[nn.Parameter]
    part: slice
    offset: int

    def is_due(self, made: int, period: int | None) -> bool:
        """Whether it is due when `made` steps have been made."""
        return period is not None and (made - self.offset) % period == 0

    @property
    def numel(self) -> int:
        return sum(p.numel() for p in self.parameters)


def fragments_of(parameters: Sequence[nn.Parameter], count: int, period: int | None) -> list[Fragment]:
    """The parameters in `count` runs of about equal size; run p is due p·period/count steps after the first.

    The cut after run p is the one between two parameters that is nearest to p/count of all values.

    Raises:
        BadInput: there are fewer parameters than fragments.
    """
    if count > max(1, len(parameters)):
        raise BadInput(f"a fragment is one parameter or more: {count} fragments of {len(parameters)} parameters")
    ends = [0, *itertools.accumulate(p.numel() for p in parameters)]
    cuts = [0]
    for number in range(1, count):
        free = range(cuts[-1] + 1, len(parameters) - (count - number) + 1)  # each run keeps one parameter at least
        cuts.append(min(free, key=lambda cut: abs(ends[cut] * count - number * ends[-1])))
    return [
        Fragment(number, list(parameters[a:b]), slice(ends[a], ends[b]), number * (period or 0) // count)
        for number, (a, b) in enumerate(itertools.pairwise([*cuts, len(parameters)]))
    ]


class UnderWay:
    """The fragment that is under way, or none.

    Attributes:
        number: the fragment's; NONE without.
        left: steps until its mean is due.
        mean: what this worker offered, and its mean once `wait` has returned.
        offered: a copy of what this worker offered, where that is kept.
        sent_nbytes: what all exchanges have sent so far.
    """

    NONE = -1

    def __init__(
        self, transport: Transport, fragments: Sequence[Fragment], *, keeps: bool, device: torch.device
    ) -> None:
        self._transport, self._keeps, self._device = transport, keeps, device
        self._averaged: Any = None  # on a device: when the exchange thread's stream has the mean
        self._numels = [fragment.numel for fragment in fragments]
        self._share: ThreadShare | None = None
        self._ended: threading.Event | None = None
        self._error: Exception | None = None
        self.sent_nbytes = 0
        self.forget()
        self._guard = weakref.WeakMethod(self._before_call)
        transport.guards.append(self._guard)

    def forget(self) -> None:
        """Nothing is under way."""
        self.number, self.left = self.NONE, 0
        self.mean = self.offered = torch.empty(0)

    def start(self, number: int, offer: Tensor, delay: int) -> None:
        """Keep `offer` for fragment `number`; its mean is due in `delay` steps."""
        self.number, self.left, self.mean = number, delay, offer
        self.offered = offer.clone() if self._keeps else torch.empty(0)

    def send(self, average: Callable[[Tensor], object]) -> None:
        """Start averaging the offer on the exchange thread."""
        ended, mean, counters = threading.Event(), self.mean, self._transport.counters
        offered = mark(mean)

        def work() -> Pausing[None]:
            before = counters.total_sent_nbytes
            try:
                let_wait(offered)
                average(mean)
                self._averaged = mark(mean)
            except Exception as error:
                self._error = error
            self.sent_nbytes += counters.total_sent_nbytes - before
            yield None

        self._ended = ended
        self._share = self._share or ThreadShare(self._transport)
        self._share.submit(work).add_done_callback(lambda _: ended.set())

    def wait(self) -> float:
        """Wait until `mean` holds the mean; returns the seconds it took.

        Raises:
            LaconicError: the exchange failed.
            CollectiveTimeout: the exchange thread did not start it in time.
        """
        begun = time.perf_counter()
        self._before_call()
        if self._error is not None:
            raise self._error
        let_wait(self._averaged)
        self._ended = self._averaged = None
        return time.perf_counter() - begun

    def _before_call(self) -> None:
        """Wait until nothing is under way: ranks use the transport in the same order."""
        if self._ended is None or threading.current_thread().name == EXCHANGE_THREAD:
            return
        transport, numel = self._transport, self._numels[self.number]
        messages = (numel // MESSAGE_NUMEL + 2) * 2 * transport.world_size  # each of which ends by the time-out
        if not self._ended.wait(patience_s := messages * transport.timeout_s):
            text = f"the mean of fragment {self.number} did not come in {patience_s:g} s"
            raise CollectiveTimeout(f"{transport.title} {text}", rank=transport.rank)

    def state_dict(self) -> dict[str, Any]:
        """The pending fragment, with its mean: waits for it first."""
        self.wait()
        state: dict[str, Any] = {"number": self.number, "left": self.left}
        if self.number != self.NONE:
            state["mean"] = self.mean.clone()
            if self._keeps:
                state["offered"] = self.offered.clone()
        return state

    def check_state(self, state: Mapping[str, Any]) -> None:
        """Refuse, with BadInput, a state that cannot be loaded whole."""
        what = "the state of what is under way"
        check_like(state, {"number": 0, "left": 0}, what)
        if not self.NONE <= state["number"] < len(self._numels):
            raise BadInput(f"{what} does not fit: it is of fragment {state['number']}, of {len(self._numels)}")
        if state["number"] != self.NONE:
            values = vector(self._numels[state["number"]])
            check_like(state, {"mean": values, **({"offered": values} if self._keeps else {})}, what)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.wait()
        self.forget()
        if state["number"] != self.NONE:
            self.number, self.left = int(state["number"]), int(state["left"])
            self.mean = state["mean"].to(self._device, copy=True)
            self.offered = state["offered"].to(self._device, copy=True) if self._keeps else self.offered

    def close(self) -> None:
        """Wait for the fragment under way, and join the exchange thread unless others use it."""
        if self._share is not None:
            self._share.close()
            self._share = None
        if self._guard in self._transport.guards:
            self._transport.guards.remove(self._guard)
