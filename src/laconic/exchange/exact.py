"""The exact part of a bucket that is otherwise exchanged by a matrix codec, and what each parameter cost.

Callers: matrix codecs (`matrices/`). Sums go through the codec `none`, so that messages are framed and checked as
those of every compressed exchange, and bytes are counted.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from laconic.codecs import codec
from laconic.exchange.auto import GUESS, cheapest_coded
from laconic.exchange.channel import Channel
from laconic.exchange.coded import CodedExchange
from laconic.schedules.link import Link
from laconic.transports.base import Transport


@dataclass(frozen=True)
class LayerForm:
    """How one parameter travelled at the last step, and what this rank sent for it.

    Attributes:
        form: "exact", "powersgd(4)", "factors", or "with weight" for a bias that needed no bytes of its own.
        raw_nbytes: what this rank would send in an all-reduce of float32 that sends the least, 2·(P−1)/P·4·numel.
        sent_nbytes: what it sent, without heads and padding.
    """

    name: str
    form: str
    raw_nbytes: int
    sent_nbytes: int


@dataclass(frozen=True)
class Route:
    """How the messages of one exchange go: the algorithm that was asked for, and the step."""

    transport: Transport
    algorithm: str = "auto"
    hosts: tuple[int, ...] | None = None
    step: int = 0
    link: Link | None = None


class ExactSum:
    """Sums float32 vectors over all ranks; keeps plan and memory while length and route stay the same."""

    def __init__(self) -> None:
        self._channel = Channel(torch.empty(0), codec("none"))
        self._key: object = None
        self._exchange: CodedExchange | None = None

    def planned(self, values: Tensor, route: Route) -> CodedExchange:
        """The exchange that sums `values` in place, the same bits on every rank."""
        self._channel.buffer = values
        name = route.algorithm
        if name == "auto":
            name = cheapest_coded([self._channel], route.transport.world_size, route.link or GUESS)
        key = (values.numel(), id(route.transport), name, route.hosts)
        if self._exchange is None or self._key != key:
            self._key = key
            self._exchange = CodedExchange([self._channel], route.transport, algorithm=name, hosts=route.hosts)
        return self._exchange


def wire_nbytes(numel: int, world_size: int, algorithm: str = "direct", itemsize: int = 4) -> int:
    """What one rank sends to sum n float32: (P−1)·4n by gather, else 2·(P−1)/P·4n, the least that is possible.

    >>> wire_nbytes(1000, 4), wire_nbytes(1000, 4, "gather")
    (6000, 12000)
    """
    if algorithm == "gather":
        return itemsize * numel * (world_size - 1)
    return 2 * itemsize * numel * (world_size - 1) // world_size
