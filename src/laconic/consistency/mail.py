"""Messages of a mesh, as modes take them in: a wait that ends in progress, in what was waited for, or in an error.

Callers: `servers/client.py`, `servers/peers.py`, `modes/gaia.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from torch import Tensor

from laconic.errors import CollectiveTimeout, PeerLost
from laconic.transports.zeromq import ZmqTransport

TICK_S = 0.02


def receive(mesh: ZmqTransport, timeout_s: float) -> tuple[int, Tensor] | None:
    """The next message and its sender; None when none came, or nobody is left who could send one."""
    try:
        sender, _, data = mesh.recv_any(timeout_s)
        return sender, data
    except CollectiveTimeout:
        return None
    except PeerLost:
        time.sleep(timeout_s)
        return None


def wait(
    mesh: ZmqTransport, done: Callable[[], bool], take_in: Callable[[float], bool], late: Callable[[], tuple[int, str]]
) -> float:
    """Take in messages until `done()`; returns the seconds it took.

    Args:
        take_in: takes in one message, waiting so many seconds at most; whether it brought anything on.
        late: the rank that is to blame when nothing came for the mesh's time-out, and what to say of it.

    Raises:
        CollectiveTimeout: nothing came for so long.
    """
    begun = moved = time.monotonic()
    while not done():
        if take_in(TICK_S):
            moved = time.monotonic()
        elif time.monotonic() - moved > mesh.timeout_s:
            peer, text = late()
            raise CollectiveTimeout(text, rank=mesh.rank, peer=peer)
    return time.monotonic() - begun
