"""A collective call in progress: what all ranks must agree on, and where its time goes.

Callers: `Transport.call` makes one; `rounds.drive` runs its rounds. A call is an object, so several can be under way on
one transport: every message carries its call's code, and only messages of equal calls match.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from laconic.errors import PayloadError

if TYPE_CHECKING:
    from laconic.transports.base import Transport


@dataclass
class Timings:
    """Where the time of an exchange went, in seconds, and what was sent."""

    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    sent_nbytes: int = 0
    messages: int = 0


@dataclass(eq=False)
class Call:
    """One call on one rank; leave it with `with`, so that the transport knows whether it was finished.

    Attributes:
        sequence: counts the calls on one transport, so that two in a row cannot be taken for each other.
        signature: what ranks compare: everything but the sequence number.
        code: 31 bits of signature and sequence, which every message carries.
        failed: it was left by an exception, and the other ranks may still wait for this one.
    """

    transport: Transport
    sequence: int
    collective: str
    algorithm: str
    numel: int
    dtype: str
    detail: str = ""
    rounds: int = 0
    timings: Timings = field(default_factory=Timings)
    failed: bool = False

    def __post_init__(self) -> None:
        extra = f" {self.detail}" if self.detail else ""
        self.signature = f"{self.collective} by {self.algorithm} of {self.numel} × {self.dtype}{extra}"
        self.code = zlib.crc32(f"{self.sequence} {self.signature}".encode()) & 0x7FFFFFFF

    def where(self, round: int | None = None) -> str:
        """The beginning of every error: `[rank 3/8] ring all_reduce, round 5 of 14`."""
        text = f"[rank {self.transport.rank}/{self.transport.world_size}] {self.algorithm} {self.collective}"
        return text if round is None else f"{text}, round {round + 1} of {self.rounds}"

    def bad_payload(self, round: int, peer: int, error: PayloadError) -> PayloadError:
        """`error` with the rank, the round and the peer it came from."""
        return PayloadError(f"{self.where(round)}: peer {peer} sent a bad payload: {error}")

    def __enter__(self) -> Call:
        return self

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is None:
            self.transport.leave(self)
        else:
            self.failed = True
