"""Whether one TCP connection can fill a link: bandwidth × delay beside the kernel's limits of its buffers.

Callers: `laconic probe`, and whatever opens ZeroMQ's connections (`zeromq_stripes.py`). A connection has at most a
window of bytes under way in a round trip. The kernel lets that grow to about half of the largest receive buffer, and
keeps what is not acknowledged in the send buffer, whole.
"""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from pathlib import Path

from laconic.errors import BadInput
from laconic.schedules.link import Link

KERNEL = Path("/proc/sys/net/ipv4")
CONNECTIONS_VARIABLE = "LACONIC_CONNECTIONS"
MAX_CONNECTIONS = 16
# At most so much of its window is asked of a connection: after a loss it has half, and one that is full cannot tell
# how much more the link holds.
_SHARE_OF_WINDOW = 0.5
_SHARE = 2  # bytes of a receive buffer for each byte of the window it gives


@dataclass(frozen=True)
class TcpLimits:
    """The largest buffers that the kernel lets a connection grow to, in bytes."""

    receive_nbytes: int
    send_nbytes: int

    @classmethod
    def read(cls, folder: Path = KERNEL) -> TcpLimits | None:
        """This machine's limits; None where the kernel does not tell them."""
        try:
            receive, send = ((folder / name).read_text().split()[2] for name in ("tcp_rmem", "tcp_wmem"))
            return cls(int(receive), int(send))
        except (OSError, IndexError, ValueError):
            return None

    @property
    def window_nbytes(self) -> int:
        """The most bytes that one connection has under way."""
        return min(self.receive_nbytes // _SHARE, self.send_nbytes)


def needed_nbytes(link: Link) -> int:
    """Bandwidth × delay: the bytes under way that fill a link, 0 where its rate has no limit.

    >>> needed_nbytes(Link.parse("1gbit,40ms"))
    10000000
    """
    return 0 if link.rate_bps is None else round(link.rate_bps / 8 * 2 * link.latency_s)


def advice(link: Link, limits: TcpLimits) -> list[str]:
    """The sysctl that lets one connection fill the link, to be set on both ends; empty where it does already.

    >>> advice(Link.parse("1gbit,40ms"), TcpLimits(6291456, 4194304))[0]
    "sysctl -w net.ipv4.tcp_rmem='4096 131072 20000000'"
    """
    needed, found = needed_nbytes(link), []
    if limits.receive_nbytes < _SHARE * needed:
        found.append(f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {_SHARE * needed}'")
    if limits.send_nbytes < needed:
        found.append(f"sysctl -w net.ipv4.tcp_wmem='4096 16384 {needed}'")
    return found


def connections_for(link: Link | None, limits: TcpLimits | None) -> int:
    """How many connections fill a link: bandwidth × delay over half of a window, at most MAX_CONNECTIONS.

    >>> connections_for(Link.parse("1gbit,40ms"), TcpLimits(6291456, 4194304))
    7
    >>> connections_for(Link.parse("100mbit,20ms"), TcpLimits(6291456, 4194304))
    1
    """
    if link is None or limits is None or limits.window_nbytes <= 0:
        return 1
    return max(1, min(MAX_CONNECTIONS, math.ceil(needed_nbytes(link) / (_SHARE_OF_WINDOW * limits.window_nbytes))))


def chosen_connections(asked: int | str | None, link: Link | None) -> int:
    """The number that was asked for, or LACONIC_CONNECTIONS has; "auto", which is the default: what the link needs.

    Raises:
        BadInput: neither "auto" nor 1 to MAX_CONNECTIONS.
    """
    given = asked if asked is not None else os.environ.get(CONNECTIONS_VARIABLE) or "auto"
    if given == "auto":
        return connections_for(link, TcpLimits.read())
    text = str(given)
    if isinstance(given, bool) or not (text.isascii() and text.isdigit()) or not 1 <= int(text) <= MAX_CONNECTIONS:
        raise BadInput(f"connections is 'auto' or a number from 1 to {MAX_CONNECTIONS}, got {given!r}")
    return int(text)
