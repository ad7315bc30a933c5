"""Notices between MPI ranks on a communicator of their own, and the ranks that have stopped or died.

Caller: `mpi.py`. MPI itself never reports that a rank has stopped. Ranks exchange their machine and process number when
they open a transport; the state of ranks on other machines cannot be seen.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from laconic.transports.base import Call
from laconic.transports.liveness import LossLedger, LostPeer

_STOPPED = "TtZX"  # by a signal, by a debugger, and two ways to be dead


class Notices(LossLedger):
    """Short messages between all ranks, and Liveness from them: ranks that closed, failed or stopped are lost.

    Attributes:
        comm: the communicator for notices; without one, none are sent or received.
        cards: of all ranks, as `own_card`.
    """

    def __init__(self, mpi: Any, world_size: int) -> None:
        super().__init__(range(world_size))
        self.mpi = mpi
        self.comm: Any = None
        self.cards: list[tuple[int, int]] = []
        self._announced = 0  # the last call we have told the others we are stalled in
        self._sending: list[tuple[Any, bytes]] = []

    def find_stopped(self, own: int) -> list[int]:
        """Note, as rank `own`, the ranks of this machine that are stopped or dead; return them."""
        found = stopped(self.cards)
        for rank in found:
            self.note(LostPeer(rank, own, "was lost: it is stopped"))
        return found

    def tell(self, **notice: Any) -> None:
        """Send a notice to every peer."""
        if self.comm is None:
            return
        self.all_sent()
        buffer = json.dumps(notice).encode()
        for peer in set(range(self.comm.Get_size())) - {self.comm.Get_rank()}:
            self._sending.append((self.comm.Isend([buffer, self.mpi.BYTE], peer, 0), buffer))

    def announce(self, call: Call) -> None:
        """Tell all ranks, once per call, which call this one waits in."""
        if self._announced != call.sequence:
            self._announced = call.sequence
            self.tell(kind="stalled", sequence=call.sequence, signature=call.signature)

    def arrived(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """Every notice that has come, with its rank."""
        status = self.mpi.Status()
        while self.comm is not None and (message := self.comm.Improbe(status=status)) is not None:
            buffer = bytearray(status.Get_count(self.mpi.BYTE))
            message.Recv([buffer, self.mpi.BYTE])
            source, notice = status.Get_source(), json.loads(buffer)
            if notice["kind"] != "stalled":
                self.note(LostPeer(source, source, "has left"))
            yield source, notice

    def all_sent(self) -> bool:
        """Whether all notices have been sent."""
        self._sending = [(request, buffer) for request, buffer in self._sending if not request.Test()]
        return not self._sending


def own_card() -> tuple[int, int]:
    """This process as two numbers: its machine and space of process numbers (0: unknown), and its number there."""
    try:
        machine = Path("/proc/sys/kernel/random/boot_id").read_text() + os.readlink("/proc/self/ns/pid")
    except OSError:
        return 0, os.getpid()
    digest = hashlib.blake2b(machine.encode(), digest_size=7).digest()
    return int.from_bytes(digest, "little") + 1, os.getpid()


def stopped(cards: list[tuple[int, int]]) -> list[int]:
    """The ranks, by their cards, that are on this machine and stopped or dead.

    >>> stopped([own_card()])
    []
    """
    machine, _ = own_card()
    return [rank for rank, (where, pid) in enumerate(cards) if machine and where == machine and not _runs(pid)]


def _runs(pid: int) -> bool:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except FileNotFoundError:
        return False
    except OSError:
        return True
    return text.rsplit(")", 1)[1].split()[0] not in _STOPPED
