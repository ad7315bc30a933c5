"""A channel: one float32 buffer on its way through a codec, and what is kept for it; and where an exchange's time went.

Callers: `coded.py`, `gather.py` and `bucket.py`. Several channels (say, the weights through a codec and the biases
exactly) share the messages of one run: small messages are what slow engines charge for.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Protocol, TypeVar

from torch import Tensor

from laconic.codecs import Codec
from laconic.exchange.residuals import Site


@dataclass
class Timings:
    """Where the time of an exchange went, in seconds, and what was sent."""

    encode_s: float = 0.0
    wait_s: float = 0.0
    decode_s: float = 0.0
    sent_nbytes: int = 0
    messages: int = 0


# An exchange that pauses at its waits, so that another can encode meanwhile.
Steps = Generator[None, None, Timings]
T = TypeVar("T")


def finish(steps: Generator[None, None, T]) -> T:
    """Run an exchange to its end, without pauses."""
    while True:
        try:
            next(steps)
        except StopIteration as done:
            result: T = done.value
            return result


class Feeds(Protocol):
    """A `Residual`, or what wraps one."""

    def encode(self, codec: Codec, x: Tensor, site: Site, *, step: int, out: Tensor, copies: int = 1) -> Tensor: ...

    def carry(self, x: Tensor) -> Tensor: ...


@dataclass
class Channel:
    """A float32 buffer, its codec, and its residual; None feeds nothing back."""

    buffer: Tensor
    codec: Codec
    residual: Feeds | None = None

    def carry(self) -> None:
        """Add to the buffer what a former schedule, world or codec left to be sent."""
        if self.residual is not None:
            self.residual.carry(self.buffer)
