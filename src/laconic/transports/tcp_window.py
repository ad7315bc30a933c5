"""Whether one TCP connection can fill a link: bandwidth × delay beside the kernel's limits of its buffers.

Caller: `laconic probe`. A connection has at most a window of bytes under way in a round trip. The kernel lets that grow
to about half of the largest receive buffer, and keeps what is not acknowledged in the send buffer, whole.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from laconic.schedules.link import Link

KERNEL = Path("/proc/sys/net/ipv4")
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
