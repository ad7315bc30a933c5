"""Faults on purpose: a transport that corrupts, drops or delays what one rank sends, or dies while sending it.

Callers: tests, and users who want to see how their job behaves on a faulty network. Wraps any engine; messages that are
not chosen pass unchanged.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from laconic.transports.base import Call, Incoming, Outgoing, Posted, Transport, members_of

# Payloads in a message are padded by at most 15 bytes, which nobody reads: so many in a row hit one that counts.
DAMAGED_NBYTES = 17


@dataclass(frozen=True)
class WireMessage:
    """A message about to be sent; faults are chosen by its fields.

    Attributes:
        sequence: the number of the collective call on this transport, from 1.
    """

    sequence: int
    collective: str
    algorithm: str
    round: int
    peer: int
    nbytes: int


Choice = Callable[[WireMessage], bool]


class Faulty(Transport):
    """`inner` with faults in what this rank sends.

    Args:
        corrupt: messages of which 17 bytes in the middle arrive with a bit flipped.
        drop: messages that are never sent.
        delay: how many seconds to wait before a message is sent.
        die: messages upon which this process kills itself, before the round is sent.

    >>> import torch
    >>> from laconic.exchange.collectives import all_reduce
    >>> from laconic.transports.threads import run_threads
    >>> from laconic.transports.world import World
    >>> def work(transport):
    ...     faulty = Faulty(transport, corrupt=lambda message: transport.rank == 1 and message.round == 0)
    ...     return all_reduce(torch.ones(1000), codec="dynamic8", algorithm="direct", group=World(faulty))
    >>> run_threads(2, work)
    Traceback (most recent call last):
    laconic.errors.PayloadError: [rank 0/2] direct all_reduce, round 1 of 2: peer 1 sent a bad payload: ...
    """

    def __init__(
        self,
        inner: Transport,
        *,
        corrupt: Choice | None = None,
        drop: Choice | None = None,
        delay: Callable[[WireMessage], float] | None = None,
        die: Choice | None = None,
    ) -> None:
        super().__init__(inner.rank, inner.world_size, inner.timeout_s)
        self.inner = inner
        self.engine = inner.engine
        self.interleaves = inner.interleaves
        self.counters = inner.counters
        self._corrupt = corrupt
        self._drop = drop
        self._delay = delay
        self._die = die

    def enter(self, call: Call) -> Call:
        super().enter(call)
        return self.inner.enter(call)

    def leave(self, call: Call) -> None:
        super().leave(call)
        self.inner.leave(call)

    def post(self, call: Call, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        kept = []
        for send in sends:
            message = WireMessage(call.sequence, call.collective, call.algorithm, round, send.peer, send.data.nbytes)
            if self._die is not None and self._die(message):
                os.kill(os.getpid(), signal.SIGKILL)
            if self._delay is not None:
                time.sleep(self._delay(message))
            if self._drop is not None and self._drop(message):
                continue
            damaged = self._corrupt is not None and self._corrupt(message)
            kept.append(Outgoing(send.peer, _damaged(send.data)) if damaged else send)
        return self.inner.post(call, kept, recvs, round)

    def split(self, colours: Sequence[int]) -> Transport:
        inner = self.inner.split(colours)
        part = Faulty(inner, corrupt=self._corrupt, drop=self._drop, delay=self._delay, die=self._die)
        self.adopt(part, members_of(colours, self.rank))
        return part

    def close(self) -> None:
        self.inner.close()

    def abandon(self, reason: str, *, expected: bool = False) -> None:
        self.inner.abandon(reason, expected=expected)

    def native_all_reduce(self, tensor: Tensor, op: str) -> bool:
        return self.inner.native_all_reduce(tensor, op)

    @property
    def has_native(self) -> bool:
        return self.inner.has_native

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)  # what only this engine has


def _damaged(data: Tensor) -> Tensor:
    copy = data.clone().view(-1)
    raw = copy.view(torch.uint8).numpy()
    first = max(0, (raw.size - DAMAGED_NBYTES) // 2)
    raw[first : first + DAMAGED_NBYTES] ^= 1
    return copy
