"""Which side of a broken network a worker is on: one that cannot reach most of the others may itself be cut off.

Caller: `watch.py`, before it publishes a view without the lost. If a majority is out of reach, it cannot reach this
worker either. So this worker waits: the majority publishes the next view first, and this worker finds at the meeting
place that it is excluded. To test reachability, open a TCP connection to each host. The kernel accepts or refuses it
whatever the process does, so a member that is slow, stopped or dead still counts as within reach.
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
    """One worker's check while it waits for the other members of a view."""

    def __init__(self) -> None:
        self._since: float | None = None
        self._asked_at = 0.0
        self._is_cut_off = False

    def suspects(self, view: View, own: int, patience_s: float) -> bool:
        """Whether most members that may be alive are out of reach; True for `patience_s` at most.

        With two members, or two halves, there is no majority: the first to publish goes on.
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
    """The members whose host answers within ANSWER_S: True if a process listens at the address, else False."""
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
    """Start a connection; None if it cannot be attempted."""
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
