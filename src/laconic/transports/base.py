"""What an engine must do to run a schedule: post the messages of one round, and wait for them with a time-out.

Callers: `executor.py` drives every engine through this interface; `exchange` will post compressed payloads through it.

Invariants: a posted slice is not copied by us; every wait ends within `timeout_s` in data or a TransportError that
names rank, round and peer; bytes and messages are counted per peer; one thread uses one transport.
"""

from __future__ import annotations

import zlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from laconic.errors import BadInput

DEFAULT_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Call:
    """One collective call: what all ranks must agree on.

    `sequence` counts the calls on one transport, so that two calls in a row cannot be taken for each other.
    """

    sequence: int
    collective: str
    algorithm: str
    numel: int
    dtype: str
    detail: str = ""
    rounds: int = 0

    @property
    def signature(self) -> str:
        """What ranks compare: everything but the sequence number."""
        extra = f" {self.detail}" if self.detail else ""
        return f"{self.collective} by {self.algorithm} of {self.numel} × {self.dtype}{extra}"

    @property
    def code(self) -> int:
        """31 bits of signature and sequence: messages of different calls never match."""
        return zlib.crc32(f"{self.sequence} {self.signature}".encode()) & 0x7FFFFFFF


@dataclass(frozen=True)
class Outgoing:
    """A slice to send; the engine reads it until `Posted.sent` returns."""

    peer: int
    data: Tensor


@dataclass(frozen=True)
class Incoming:
    """A message to receive: into `into`, or into memory of the engine's own when that is None.

    The engine's own memory is valid until the next round is posted. With `at_most` a shorter message may come, whose
    true length stands in the message itself (gloo does not tell it); the receiver gets at least that much, and whoever
    reads the message counts it.
    """

    peer: int
    numel: int
    dtype: torch.dtype
    device: torch.device
    into: Tensor | None = None
    at_most: bool = False


@dataclass
class Counters:
    """Bytes and messages per peer since the transport was opened."""

    sent_nbytes: dict[int, int] = field(default_factory=dict)
    sent_messages: dict[int, int] = field(default_factory=dict)
    received_nbytes: dict[int, int] = field(default_factory=dict)
    received_messages: dict[int, int] = field(default_factory=dict)
    rounds: int = 0

    def count_sent(self, peer: int, nbytes: int) -> None:
        self.sent_nbytes[peer] = self.sent_nbytes.get(peer, 0) + nbytes
        self.sent_messages[peer] = self.sent_messages.get(peer, 0) + 1

    def count_received(self, peer: int, nbytes: int) -> None:
        self.received_nbytes[peer] = self.received_nbytes.get(peer, 0) + nbytes
        self.received_messages[peer] = self.received_messages.get(peer, 0) + 1

    @property
    def total_sent_nbytes(self) -> int:
        return sum(self.sent_nbytes.values())


class Posted(ABC):
    """A round under way."""

    @abstractmethod
    def received(self, index: int) -> Tensor:
        """Wait for the index-th incoming message of the round; returns its values (`into` when that was given)."""

    @abstractmethod
    def sent(self) -> None:
        """Wait until every outgoing slice of the round may be written to again."""


class Transport(ABC):
    """One rank's end of an engine."""

    engine: str = ""
    has_futures: bool = False
    interleaves: bool = False  # rounds of several calls may be under way at once, received into the caller's memory

    def __init__(self, rank: int, world_size: int, timeout_s: float) -> None:
        self.rank = rank
        self.world_size = world_size
        self.timeout_s = timeout_s
        self.counters = Counters()
        self.call: Call | None = None
        self._sequence = 0

    def begin(self, collective: str, algorithm: str, numel: int, dtype: str, detail: str = "", rounds: int = 0) -> Call:
        """Enter a collective; its messages carry the call's code, so that only equal calls match."""
        self._sequence += 1
        self.call = Call(self._sequence, collective, algorithm, numel, dtype, detail, rounds)
        return self.call

    def resume(self, call: Call) -> None:
        """Go on with a call that another was begun after: for engines that `interleave`."""
        self.call = call

    def end(self) -> None:
        """Leave the collective."""
        self.call = None

    @abstractmethod
    def post(self, sends: Sequence[Outgoing], recvs: Sequence[Incoming], round: int) -> Posted:
        """Start all messages of one round of the current call."""

    @abstractmethod
    def close(self) -> None:
        """Give up connections and threads; safe to call twice."""

    def abandon(self, reason: str) -> None:
        """Leave the call this rank is in and cannot finish; the others get PeerLost, naming it, instead of a wait.

        The transport cannot be used afterwards. Outside a call nobody waits for this rank, and nothing happens.
        """
        if self.call is not None:
            self.close()

    def native_all_reduce(self, tensor: Tensor, op: str) -> bool:
        """Reduce 1-D `tensor` in place by the engine's own all-reduce; False when the engine has none."""
        return False

    def start_native(self, tensor: Tensor) -> Callable[[], None]:
        """Begin to sum 1-D `tensor` by the engine's own all-reduce; returns what waits for the end of it.

        Every rank must be in the same call, with tensors of the same size and dtype: see `executor.agree`.
        """
        if not self.native_all_reduce(tensor, "sum"):
            raise BadInput(f"{self.where()}: {self.engine} has no all-reduce of its own for {tensor.dtype}")
        return lambda: None

    def native_future(self, tensor: Tensor) -> Any:
        """As `start_native`, but returns a torch future, on engines that `has_futures`."""
        raise NotImplementedError(f"{self.engine} has no futures")

    @property
    def has_native(self) -> bool:
        """Whether `native_all_reduce` works on this engine."""
        return type(self).native_all_reduce is not Transport.native_all_reduce

    def where(self, round: int | None = None) -> str:
        """The beginning of every error: `[rank 3/8] ring all_reduce, round 5 of 14`."""
        text = f"[rank {self.rank}/{self.world_size}]"
        if self.call is not None:
            text += f" {self.call.algorithm} {self.call.collective}"
            if round is not None:
                text += f", round {round + 1} of {self.call.rounds}"
        return text

    def __enter__(self) -> Transport:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Arena:
    """Memory for messages that are added on arrival: kept from call to call, handed out piece by piece in a round."""

    def __init__(self) -> None:
        self._blocks: dict[torch.device, Tensor] = {}
        self._used = 0

    def recycle(self) -> None:
        """Begin a round: everything handed out before may be overwritten."""
        self._used = 0

    def take(self, incoming: Incoming) -> Tensor:
        """A piece for one message, aligned to 64 bytes."""
        nbytes = incoming.numel * incoming.dtype.itemsize
        first, last = self._used, self._used + nbytes
        block = self._blocks.get(incoming.device)
        if block is None or last > block.numel():
            # Pieces handed out earlier in this round keep the old block alive; the new one serves from here on.
            first, last = 0, nbytes
            size = max(nbytes, 2 * (0 if block is None else block.numel()))
            block = torch.empty(size, dtype=torch.uint8, device=incoming.device)
            self._blocks[incoming.device] = block
        self._used = -(-last // 64) * 64
        return block[first:last].view(incoming.dtype)
