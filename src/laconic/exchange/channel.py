"""A channel: one float32 buffer on its way through a codec, and the residual that is kept for it.

Callers: `coded.py`, `scatter.py`, `sparse_exchange.py` and `bucket.py`. Several channels (say, the weights through a
codec and the biases exactly) share the messages of one run: small messages are what slow engines charge for.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import NonFiniteError
from laconic.exchange.residuals import Site


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

    def encode(self, values: Tensor, site: Site, draws: int, room: Tensor, copies: int = 1) -> Tensor | None:
        """The payload of `values`, a part of the buffer, in `room`; None (poison) where they hold NaN or infinity.

        Args:
            site: whose residual is added, and keeps what the codec leaves out.
            draws: makes the draws of stochastic codecs differ.
            copies: how many ranks encode the same values, each keeping the same residual.
        """
        try:
            if self.residual is None:
                return self.codec.encode(values, step=draws, out=room)
            return self.residual.encode(self.codec, values, site, step=draws, out=room, copies=copies)
        except NonFiniteError:
            return None


def decode(coder: Codec, payload: Tensor | None, values: Tensor, *, add: bool) -> None:
    """Add a payload to `values`, or put it in their place; poison makes them NaN."""
    if payload is None:
        values.fill_(float("nan"))
    elif add:
        coder.decode_add(payload, values)
    else:
        coder.decode(payload, values.numel(), out=values)


def detail(channels: Sequence[Channel]) -> str:
    """What ranks compare of the channels they exchange."""
    return " and ".join(f"{channel.buffer.numel()} through {channel.codec}" for channel in channels)
