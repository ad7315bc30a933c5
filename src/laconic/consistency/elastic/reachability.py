"""Which side of a broken network a worker is on: one that cannot reach most of the others may itself be cut off.

Caller: `watch.py`, before it publishes a view without the lost. A majority that is out of reach has lost us, too: it
makes the next view first if we hesitate, and we find at the meeting place that we are out. The others' hosts are asked
for a TCP connection, which they accept or refuse by themselves, whatever the process does: who is merely slow, stopped
or dead is not out of reach.
"""

from __future__ import annotations

import errno
import selectors
import socket
import time
from collections.abc import Mapping

from laconic.consistency.elastic.meeting import View
from laconic.errors import PayloadError
from laconic.transports.zeromq_address import Address

ASK_S = 1.0  # how often the others' hosts are asked
ANSWER_S = 0.4  # how long they have to answer
_UNDER_WAY = (0, errno.EINPROGRESS)


class CutOffCheck:
    """One worker's, while it waits for the others of one view."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._asked_at = 0.0
        self._is_cut_off = False

    def suspects(self, view: View, own: int, patience_s: float) -> bool:
        """Whether most of those who may live are out of reach; for `patience_s` from the first time at most.

        With two members, or two halves, nobody has a majority: whoever is first goes on.
        """
        others = {member: address for member, address in view.members if member != own}
        if len(others) < 2:
            return False
        self._since = self._since or time.monotonic()
        if time.monotonic() - self._since > patience_s:
            return False
        if time.monotonic() - self._asked_at > ASK_S:
            answers = ask(others)
            out_of_reach = len(others) - len(answers)
            living = len(view.ids) - sum(not accepted for accepted in answers.values())
            self._is_cut_off, self._asked_at = 2 * out_of_reach > living, time.monotonic()
        return self._is_cut_off


def ask(addresses: Mapping[int, str]) -> dict[int, bool]:
    """Whose host answers within ANSWER_S: True where somebody listens at the address, False where nobody does."""
    answers: dict[int, bool] = {}
    begun = {made: member for member, address in addresses.items() if (made := _begin(address)) is not None}
    with selectors.DefaultSelector() as waiting:  # select.select refuses files of a number above 1023
        try:
            for connection, member in begun.items():
                waiting.register(connection, selectors.EVENT_WRITE, (connection, member))
            deadline = time.monotonic() + ANSWER_S
            while waiting.get_map() and (left_s := deadline - time.monotonic()) > 0:
                for connection, member in [key.data for key, _ in waiting.select(left_s)]:
                    failure = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                    waiting.unregister(connection)
                    if failure in (0, errno.ECONNREFUSED):
                        answers[member] = failure == 0
        finally:
            for connection in begun:
                connection.close()
    return answers


def _begin(address: str) -> socket.socket | None:
    """A connection in the making; None where it cannot even be tried."""
    try:
        place = Address.parse(address)
    except PayloadError:
        return None
    connection = socket.socket(socket.AF_INET6 if ":" in place.host else socket.AF_INET)
    connection.setblocking(False)
    try:
        if connection.connect_ex((place.host, place.port)) in _UNDER_WAY:
            return connection
    except OSError:  # a name that nobody knows
        pass
    connection.close()
    return None
