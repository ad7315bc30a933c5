"""How the ranks of a ZeroMQ world find each other: addresses by a store or by any other way, then hellos.

Callers: `zeromq.py`, and whoever opens a mesh of its own.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from laconic.errors import CollectiveTimeout

if TYPE_CHECKING:
    from laconic.transports.zeromq import ZmqTransport


def meet_at(store: Any, transport: ZmqTransport) -> None:
    """Exchange addresses through the store, connect to all, and wait until all have said hello."""
    others = [peer for peer in range(transport.world_size) if peer != transport.rank]
    store.set(f"zmq/{transport.rank}", transport.address)
    if not others:
        return
    try:
        store.wait([f"zmq/{peer}" for peer in others], timedelta(seconds=transport.timeout_s))
    except RuntimeError as error:  # the time is up, or the store is gone
        with contextlib.suppress(RuntimeError):
            others = [peer for peer in others if not store.check([f"zmq/{peer}"])] or others
        raise _absent(transport, "no address", others) from error
    meet((transport, {rank: store.get(f"zmq/{rank}").decode() for rank in others}))


def meet(*meetings: tuple[ZmqTransport, Mapping[int, str]]) -> None:
    """Connect transports to their peers, by rank and address, and wait until all have said hello.

    Raises:
        CollectiveTimeout: not all did within the first transport's time-out.
    """
    for transport, addresses in meetings:
        for rank, address in addresses.items():
            transport.add_peer(rank, address)
    deadline = time.monotonic() + max((transport.timeout_s for transport, _ in meetings), default=0.0)
    for transport, addresses in meetings:
        while missing := [rank for rank in addresses if not transport.has_met(rank)]:
            if time.monotonic() > deadline:
                raise _absent(transport, "no hello", missing)


def _absent(transport: ZmqTransport, what: str, missing: list[int]) -> CollectiveTimeout:
    names = ", ".join(map(str, missing))
    text = f"{transport.where()} zmq: {what} from rank {names} in {transport.timeout_s:g} s; were all ranks started?"
    return CollectiveTimeout(text, rank=transport.rank, peer=missing[0])
