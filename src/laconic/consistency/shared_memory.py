"""Memory that all workers of one host share and that no crash leaves behind.

Caller: `hogwild`. Rank 0 makes memory that has no name in any file system (memfd); the others open it by rank 0's
process number, which goes by broadcast. So there is nothing to unlink: it is gone with the last worker, however they
end. A random token in it tells a worker on another host that what it opened, if anything, is not it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets

import torch
from torch import Tensor

from laconic.errors import BadInput
from laconic.exchange.collectives import all_gather, broadcast
from laconic.transports.world import World

PROCESSES = "/proc"  # where processes' open files are found by number
TOKEN_NBYTES = 64  # a cache line; 16 bytes of it are the token


class SharedMemory:
    """`nbytes` of zeros, the same memory on every rank of `world`; all must call it, in the same place.

    Raises:
        BadInput: on all ranks: some are on another host, or there is not enough memory.

    Attributes:
        bytes: the memory, a 1-D uint8 tensor; tensors made of it stay valid until `close`.
    """

    def __init__(self, world: World, nbytes: int) -> None:
        self._map: mmap.mmap | None = None
        size = TOKEN_NBYTES + nbytes
        place = torch.zeros(4, dtype=torch.int64)  # process, file, and the token
        file, problem = -1, ""
        if world.rank == 0:
            file, problem = _make(size)
            token = secrets.token_bytes(16)
            if file >= 0:
                self._map = mmap.mmap(file, size)
                self._map[:16] = token
            place[:2] = torch.tensor([os.getpid(), file])
            place[2:] = torch.frombuffer(bytearray(token), dtype=torch.int64)
        broadcast(place, root=0, group=world)
        process, number = int(place[0]), int(place[1])
        if world.rank != 0 and number >= 0:
            self._map = _open(f"{PROCESSES}/{process}/fd/{number}", size, place[2:].numpy().tobytes())
        found = all_gather(torch.tensor([self._map is not None], dtype=torch.uint8), group=world)
        if file >= 0:
            os.close(file)  # all who can have opened it
        if number < 0:
            raise BadInput(f"hogwild: there is no shared memory of {size} bytes on rank 0's host{problem}")
        if not bool(found.all()):
            self.close()
            away = [rank for rank in range(world.world_size) if not bool(found[rank])]
            raise BadInput(
                f"hogwild shares memory, so all workers must be on one host: rank{'s' * (len(away) > 1)} "
                f"{', '.join(map(str, away))} cannot open rank 0's; use async or local across hosts"
            )
        assert self._map is not None
        self.bytes: Tensor = torch.frombuffer(self._map, dtype=torch.uint8, offset=TOKEN_NBYTES)

    def close(self) -> None:
        """Give the memory up; nobody may hold a tensor made of `bytes` any more."""
        self.bytes = torch.empty(0, dtype=torch.uint8)
        held, self._map = self._map, None
        if held is not None:
            with contextlib.suppress(BufferError):  # a tensor still looks at it: it goes with that
                held.close()


def _make(nbytes: int) -> tuple[int, str]:
    """A file in memory with all its pages reserved, or −1 and why not."""
    file = -1
    try:
        file = os.memfd_create("laconic-hogwild")
        os.posix_fallocate(file, 0, nbytes)
    except OSError as error:
        if file >= 0:
            os.close(file)
        return -1, f": {error.strerror}"
    return file, ""


def _open(path: str, nbytes: int, token: bytes) -> mmap.mmap | None:
    """Rank 0's memory, or None where `path` is not it."""
    try:
        file = os.open(path, os.O_RDWR)
    except OSError:
        return None
    try:
        found = mmap.mmap(file, nbytes)
    except (OSError, ValueError):
        return None
    finally:
        os.close(file)
    if found[:16] == token:
        return found
    found.close()
    return None
