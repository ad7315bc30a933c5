"""Memory that other MPI ranks read and add to without its owner taking part: MPI windows, passive target.

Callers: the one-sided forms of `async`, `hogwild` and `gossip`. Reads and additions are atomic value by value, and
those of one rank to the same values of another happen in the order they were made: both are MPI accumulates.

Invariant: every wait is on a request that the transport polls, so it ends in data or in an error that names the peer.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.transports.mpi import MpiTransport, memory_of
from laconic.transports.world import World

COUNTER_NBYTES = 64  # one counter a rank, in a cache line of its own
CLOSE_S = 5.0
Part = tuple[int, int, Tensor]  # a rank, where in its values, and what is read into or added


class Window:
    """Float32 values on every rank, and a counter. All ranks must make it in the same place, and close it.

    Args:
        values: this rank's initial values; ranks may have different numbers of them.
        mode: who asks, for the error.

    Raises:
        BadInput: the world does not run on MPI.

    Attributes:
        moved_nbytes: bytes that this rank has added to other ranks, or read of them.
    """

    def __init__(self, world: World, values: Tensor, mode: str) -> None:
        transport = world.transport
        if not isinstance(transport, MpiTransport):
            text = f"{mode} with rma=true uses MPI windows: start the job by mpiexec"
            raise BadInput(f"{text}; this world runs on engine '{world.engine}'")
        self._transport, self._mpi = transport, transport.mpi
        self._window = self._mpi.Win.Allocate(COUNTER_NBYTES + values.nbytes, 1, self._mpi.INFO_NULL, transport.comm)
        self._window.Set_errhandler(self._mpi.ERRORS_RETURN)
        memory = torch.frombuffer(self._window.tomemory(), dtype=torch.uint8)
        memory[:COUNTER_NBYTES] = 0
        self._own = memory[COUNTER_NBYTES:].view(torch.float32)
        self.moved_nbytes = 0
        self._closed = False
        self._window.Lock_all()
        self.write_own(values)

    def write_own(self, values: Tensor) -> None:
        """Replace this rank's values; nobody may read or add to them meanwhile."""
        self._own.copy_(values)
        self._window.Sync()

    def read(self, parts: Sequence[Part]) -> None:
        """Read values of several ranks at once."""
        mpi = self._mpi
        self._finish(
            parts,
            [
                self._window.Rget_accumulate(
                    [memory_of(mpi, out), 0, mpi.FLOAT], [memory_of(mpi, out), mpi.FLOAT], rank,
                    [COUNTER_NBYTES + 4 * begin, out.numel(), mpi.FLOAT], mpi.NO_OP,
                )
                for rank, begin, out in parts
            ],
        )  # fmt: skip

    def add(self, parts: Sequence[Part]) -> None:
        """Add to values of several ranks at once; returns when what was added may be written to again."""
        mpi = self._mpi
        self._finish(
            parts,
            [
                self._window.Raccumulate(
                    [memory_of(mpi, values), mpi.FLOAT], rank,
                    [COUNTER_NBYTES + 4 * begin, values.numel(), mpi.FLOAT], mpi.SUM,
                )
                for rank, begin, values in parts
            ],
        )  # fmt: skip

    def count(self, ranks: Sequence[int], by: int) -> list[int]:
        """Add to the counters of several ranks; return their previous values."""
        mpi, more = self._mpi, torch.tensor([by])
        parts = [(rank, 0, torch.zeros(1, dtype=torch.int64)) for rank in ranks]
        whole = mpi.INT64_T
        requests = [
            self._window.Rget_accumulate(
                [memory_of(mpi, more), whole], [memory_of(mpi, before), whole], rank, [0, 1, whole], mpi.SUM
            )
            for rank, _, before in parts
        ]
        self._finish(parts, requests)
        return [int(before) for _, _, before in parts]

    def _finish(self, parts: Sequence[Part], requests: Sequence[object]) -> None:
        for (rank, _, data), request in zip(parts, requests, strict=True):
            self._transport.wait_for(request, rank, 0)  # type: ignore[arg-type]
            if rank != self._transport.rank:
                self.moved_nbytes += data.nbytes

    def close(self) -> None:
        """Free the memory once all ranks close, after a short wait for them; otherwise it stays until MPI ends."""
        if self._closed or self._mpi.Is_finalized():
            return
        self._closed = True
        self._own = torch.empty(0)
        if self._transport.broken is not None:
            return
        with contextlib.suppress(self._mpi.Exception):
            everyone = self._transport.comm.Ibarrier()
            deadline = time.monotonic() + min(CLOSE_S, self._transport.timeout_s)
            while not everyone.Test():
                if time.monotonic() > deadline:
                    return
                time.sleep(1e-3)
            self._window.Unlock_all()
            self._window.Free()
