"""One order for messages that travel over several TCP connections.

Callers: `zeromq_peer.py` sends, `zeromq_mesh.py` receives. One connection has at most a window of bytes under way, and
on a long fat link that is less than the link holds. A sender with `connections` above 1 numbers its messages. Short
ones take its first connection. Payloads take the others in turn, and wait where the next one's queue is full, so one
that lags holds the others up. The receiver takes messages in the order of their numbers, as if there were one
connection.
"""

from __future__ import annotations

import struct
from typing import Generic, TypeVar

from laconic.errors import PayloadError
from laconic.transports.tcp_window import MAX_CONNECTIONS

# Chunks of 1 MiB that wait in ZeroMQ for each connection; the kernel has 4 MB more.
QUEUE = 4
# What waits for a message that lags: a queue, and two of the kernel's buffers, for each of the other connections.
MAX_HELD_NBYTES = MAX_CONNECTIONS * (32 << 20)
NUMBER = struct.Struct("<Q")
T = TypeVar("T")


class InOrder(Generic[T]):
    """The messages of one sender, in the order of their numbers, whichever connection each came by.

    >>> order: InOrder[str] = InOrder()
    >>> order.take(1, "b", 1), order.take(0, "a", 1)
    ([], ['a', 'b'])
    """

    def __init__(self) -> None:
        self._due = 0
        self._held: dict[int, tuple[T, int]] = {}
        self.held_nbytes = 0

    def take(self, number: int, message: T, nbytes: int) -> list[T]:
        """Take a message of so many bytes; return those that are due by now.

        Raises:
            PayloadError: a number that came before, or more held than an honest sender makes us hold.
        """
        if number < self._due or number in self._held:
            raise PayloadError("a number that came before")
        if number > self._due:
            if self.held_nbytes + nbytes > MAX_HELD_NBYTES:
                raise PayloadError("too many messages ahead of one that is missing")
            self._held[number] = message, nbytes
            self.held_nbytes += nbytes
            return []
        ready = [message]
        self._due += 1
        while self._due in self._held:
            message, nbytes = self._held.pop(self._due)
            self.held_nbytes -= nbytes
            self._due += 1
            ready.append(message)
        return ready
