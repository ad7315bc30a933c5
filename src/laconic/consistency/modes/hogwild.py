"""Hogwild: all workers of one host write to the same weights, without locks."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from laconic.consistency.averaging import OwnWeights, average_buffers
from laconic.consistency.base import Mode, Setup, register
from laconic.consistency.master_weights import is_plain
from laconic.consistency.one_sided import NO_CODEC, SharedWeights
from laconic.errors import BadInput
from laconic.exchange.collectives import all_gather, barrier, broadcast
from laconic.transports.world import World

LINE = 64  # bytes of a cache line: each worker counts in its own
PROCESSES = "/proc"  # where processes' open files are found by number
TOKEN_NBYTES = 64  # a cache line; 16 bytes of it are the token


class SharedMemory:
    """`nbytes` of zeros, the same memory on every rank of `world`; all must call it, in the same place.

    Rank 0 makes memory that has no name in any file system (memfd); the others open it by rank 0's process number. So
    there is nothing to unlink: it is gone with the last worker, however they end. A random token in it tells a worker
    on another host that what it opened, if anything, is not it.

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
        """Release the memory; no tensor made of `bytes` may be in use."""
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


@register("hogwild")
@dataclass(frozen=True)
class Hogwild(Mode):
    """Every worker's parameters are views of one shared memory, and all optimisers step on them at once.

    w ← w − η∇f(w′), where w′ is what w was when this worker read it. Nothing is locked: two workers that add to the
    same value within the same few nanoseconds may lose one of the two additions. With sparse gradients
    (nn.Embedding(sparse=True) under SGD or SparseAdam) only the rows that were touched are written. The inner
    optimiser's state (momentum, moments) is each worker's own.

    m workers make m updates in the time of one, each of full size: it is as if one worker made m times as many steps.

    Cost: no bytes; one memory for all. Staleness is counted: the updates of others between this worker's last step,
    after which it read the weights, and its next. `finish` waits for all workers; `close` gives each model a copy of
    its own.

    Args:
        rma: under mpiexec, the weights lie in MPI windows, on any hosts: after a step, what it changed is added by
            MPI, atomically, and the weights are read (see `one_sided.py`). Cost: n float32 there and n back a step.

    Source: Niu et al., Hogwild!: A Lock-Free Approach to Parallelizing Stochastic Gradient Descent, NeurIPS 2011.
    Differs: an update is the optimiser's own vectorised one, not an atomic addition to each value.
    """

    rma: bool = False

    summary: ClassVar[str] = "workers of one host write to the same weights without locks"
    source: ClassVar[str] = "Niu et al., Hogwild!, NeurIPS 2011"
    examples: ClassVar[tuple[str, ...]] = ("hogwild",)
    same_weights: ClassVar[bool] = False

    @property
    def one_host(self) -> bool:  # type: ignore[override]
        return not self.rma

    @property
    def lockstep(self) -> bool:
        return False

    @property
    def no_codec(self) -> str:
        return NO_CODEC if self.rma else "it sends nothing"

    def install(self, setup: Setup) -> OwnWeights:
        return SharedWeights(setup, "hogwild", staleness_aware=False) if self.rma else HogwildAgreement(setup)


class HogwildAgreement(OwnWeights):
    """Hogwild at work."""

    def __init__(self, setup: Setup) -> None:
        super().__init__(setup)
        if strange := [p for p in self.weights.parameters if not is_plain(p)]:
            text = f"a parameter is {strange[0].dtype} on {strange[0].device}"
            raise BadInput(f"hogwild's workers write to one memory of float32 weights on the CPU; {text}")
        world = setup.world
        counts_nbytes = LINE * world.world_size
        self.memory = SharedMemory(world, counts_nbytes + self.weights.values.nbytes)
        self._counts = self.memory.bytes[:counts_nbytes].view(torch.int64).view(world.world_size, -1)[:, 0]
        shared = self.memory.bytes[counts_nbytes:].view(torch.float32)
        if world.rank == 0:
            shared.copy_(self.weights.values)
        barrier(group=world)  # nobody steps on weights that are not there yet
        self.weights.lay(shared)
        self.resources.callback(self._give_up)
        self._read_at = 0

    @property
    def updates(self) -> list[int]:
        """How many updates each worker has made, by rank; each counts its own only, so no count is lost."""
        return [int(count) for count in self._counts]

    def _others(self) -> int:
        """How many updates the others have made."""
        return int(self._counts.sum() - self._counts[self.world.rank])

    def before_step(self) -> None:
        with self.agreeing():
            self._stale = self._others() - self._read_at

    def after_step(self) -> None:
        self._counts[self.world.rank] += 1
        self._read_at = self._others()
        self.settle(self._stale)

    def finish(self) -> None:
        """Wait until all have made their last update; the mean of the buffers."""
        barrier(group=self.world)
        if not self.alone:
            average_buffers(self.model, self.world)

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "updates": self.updates}

    def _give_up(self) -> None:
        """Leave the shared memory; the model keeps its own copy of the weights."""
        self.weights.lay(self.weights.values.clone())
        self._counts = self._counts.clone()
        self.memory.close()
