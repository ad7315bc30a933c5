"""End training among peers: average the rows of all remaining ranks, although any of them may be lost meanwhile.

Callers: decentralised `stale` and asynchronous `gossip`, whose `finish` cannot use a collective of the world: one lost
rank would end it for all.

All ranks report that they are ready. The root, the lowest remaining rank, receives every row, averages them and sends
the mean. When all have it, the root commits it in the job's store and announces that; only then does any rank return.
Invariant: if one rank returned with a mean, all remaining ranks hold it. If the root is lost before it has committed,
the next rank replaces it.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from laconic.consistency.agreed_losses import AgreedLosses
from laconic.consistency.servers.messages import ServerKind, ServerMessage
from laconic.consistency.worker_mesh import wait
from laconic.transports.frame import NOTHING
from laconic.transports.zeromq import ZmqTransport

GRACE_S = 0.5  # what was sent before its sender left or died may take so long to come


class Closing:
    """One rank's part; all may call `agree` again after more training.

    Args:
        send: (rank, message) → sends it, unless that rank is gone.
        merge: the rows of all remaining ranks, in order → their mean.
    """

    def __init__(
        self,
        mesh: ZmqTransport,
        losses: AgreedLosses,
        send: Callable[[int, ServerMessage], None],
        merge: Callable[[list[Tensor]], Tensor],
    ) -> None:
        self._mesh, self._losses, self._send, self._merge = mesh, losses, send, merge
        self._number = 0  # of this agreement
        self._ready: dict[int, set[int]] = {}  # who is ready, by number
        self._gone_since: dict[int, float] = {}
        self._row = torch.empty(0, dtype=torch.uint8)
        self._begin()

    def _begin(self) -> None:
        self._root: int | None = None
        self._rows: dict[int, Tensor] = {}
        self._mean: Tensor | None = None
        self._stored: set[int] = set()
        self._committed = False

    def agree(self, take_in: Callable[[float], bool], row: Callable[[], Tensor]) -> tuple[Tensor, float]:
        """The mean of all rows, the same on all, and the seconds waited for it.

        Args:
            take_in: receives one message of the mesh within so many seconds; returns whether one came.
            row: what this rank holds, asked for when all are ready: nobody trains any more.
        """
        self._begin()
        self._number += 1
        self._tell(ServerKind.FINISH)
        self.take(ServerMessage(ServerKind.FINISH, 0, self._losses.rank, self._number))

        def look(timeout_s: float) -> bool:
            came = take_in(timeout_s)
            if not came:
                self.drop_gone(self._awaited())
            return came

        waited = wait(self._mesh, lambda: not self._unready(), look, self._late)
        self._row = row()
        waited += wait(self._mesh, self._is_agreed, look, self._late)
        assert self._mean is not None
        return self._mean, waited

    def take(self, message: ServerMessage) -> None:
        """Handle a peer's message about the end; ignore all others."""
        if message.kind == ServerKind.FINISH:
            self._ready.setdefault(message.sequence, set()).add(message.worker)
        elif message.sequence != self._number:
            return
        elif message.kind == ServerKind.PULL and message.version == self._losses.rank:
            self._rows[message.worker] = message.payload
        elif message.kind == ServerKind.STORED and message.version == self._losses.rank:
            self._stored.add(message.worker)
        elif message.kind == ServerKind.REPLY and message.version == self._root:
            self._mean = message.payload
            self._send(self._root, ServerMessage(ServerKind.STORED, 0, self._losses.rank, self._number, self._root))
        elif message.kind == ServerKind.COMMIT and message.version == self._root:
            self._committed = True

    def drop_gone(self, awaited: set[int]) -> None:
        """Give up the `awaited` ranks that are gone, once their last messages have had time to arrive."""
        self._losses.look()
        now, live = time.monotonic(), {self._losses.rank, *self._mesh.peers}
        for rank in sorted(awaited - live):
            if now - self._gone_since.setdefault(rank, now) > GRACE_S:
                self._losses.give_up(rank)

    def _unready(self) -> set[int]:
        return set(self._losses.here) - self._ready.get(self._number, set())

    def _awaited(self) -> set[int]:
        """The ranks whose messages are awaited."""
        if unready := self._unready():
            return unready
        if self._root != self._losses.rank:
            return set() if self._root is None else {self._root}
        return set(self._losses.here) - (set(self._rows) if self._mean is None else self._stored)

    def _is_agreed(self) -> bool:
        left, me = self._losses.here, self._losses.rank
        if self._root != left[0]:
            if self._mean is not None and self._losses.is_committed(f"{self._number}/{self._root}"):
                return True
            self._root, self._mean = left[0], None
            if self._root == me:
                self._rows[me] = self._row
            else:
                self._send(
                    self._root, ServerMessage(ServerKind.PULL, 0, me, self._number, self._root, payload=self._row)
                )
        if self._root != me:
            return self._committed
        others = set(left) - {me}
        if self._mean is None and others.issubset(self._rows):
            self._mean = self._merge([self._rows[rank] for rank in left])
            self._tell(ServerKind.REPLY, self._mean)
        if self._mean is None or not others.issubset(self._stored):
            return False
        self._losses.commit(f"{self._number}/{me}")
        self._tell(ServerKind.COMMIT)
        return True

    def _tell(self, kind: ServerKind, payload: Tensor = NOTHING) -> None:
        message = ServerMessage(kind, 0, self._losses.rank, self._number, self._root or 0, payload=payload)
        for rank in self._losses.here:
            if rank != self._losses.rank:
                self._send(rank, message)

    def _late(self) -> tuple[int | None, str]:
        awaited = sorted(self._awaited())
        names = ", ".join(map(str, awaited))
        text = f"nothing came in {self._mesh.timeout_s:g} s at the end of training; waiting for rank {names}"
        return (awaited[0] if awaited else None), f"{self._losses.where}: {text}"
