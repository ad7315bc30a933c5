"""The exact mean of a sparse gradient, as `nn.Embedding(sparse=True)` makes it: coalesced, as DDP alone would give it.

Caller: `state.py`; DDP hands such a gradient over as a bucket of its own. No codec touches it: its rows are sent as
float32 with their places, by a sparse all-reduce, and added in the same order on all ranks. Each row has a one behind
it, so that a stream that has turned dense on the way still tells which rows are there: SparseAdam steps only those.
"""

from __future__ import annotations

import math
import time

import torch
from torch import Tensor

from laconic.exchange.sparse import Memory, SparseStream, sparse_steps
from laconic.transports.base import Pausing, Timings, Transport


class SparseGradient:
    """Averages one parameter's sparse gradient, step by step; messages are received into the same memory each time."""

    def __init__(self) -> None:
        self._memory: Memory = {}

    def steps(self, gradient: Tensor, transport: Transport) -> Pausing[tuple[Timings, str]]:
        """Average `gradient` over all ranks, in place; returns where the time went, and the algorithm.

        The algorithm follows from the number of ranks alone: how many rows the others have is not known.
        """
        begun, timings = time.perf_counter(), Timings()
        algorithm = "ssar_recursive_doubling" if transport.world_size <= 2 else "ssar_split_allgather"
        stream = _stream(gradient)
        encode_s = time.perf_counter() - begun
        if transport.world_size > 1:
            stream, timings = yield from sparse_steps(stream, transport, algorithm, memory=self._memory)
        begun = time.perf_counter()
        gradient.copy_(_mean(stream, gradient, transport.world_size))
        timings.encode_s += encode_s
        timings.decode_s += time.perf_counter() - begun
        return timings, algorithm


def _sizes(gradient: Tensor) -> tuple[tuple[int, ...], int]:
    """The shape of the places that a row can have, and the values of a row."""
    count = gradient.sparse_dim()
    return tuple(gradient.shape[:count]), math.prod(gradient.shape[count:])


def _stream(gradient: Tensor) -> SparseStream:
    places, width = _sizes(gradient)
    own = gradient.detach().coalesce()
    indices, values = own.indices().cpu(), own.values().to("cpu", torch.float32)
    rows = torch.zeros(indices.shape[1], dtype=torch.int64)
    for size, index in zip(places, indices, strict=True):
        rows = rows * size + index
    spread = rows[:, None] * (width + 1) + torch.arange(width + 1)
    marked = torch.cat([values.reshape(-1, width), torch.ones(rows.numel(), 1)], dim=1)
    return SparseStream.of(spread.view(-1), marked.view(-1), math.prod(places) * (width + 1))


def _mean(stream: SparseStream, like: Tensor, world_size: int) -> Tensor:
    places, width = _sizes(like)
    marked = torch.from_numpy(stream.values).view(-1, width + 1)
    if stream.indices is None:
        rows = marked[:, width].nonzero().view(-1)
        marked = marked[rows]
    else:
        rows = torch.from_numpy(stream.indices).view(-1, width + 1)[:, 0] // (width + 1)
    indices: list[Tensor] = []
    for size in reversed(places):
        indices.insert(0, rows % size)
        rows = rows // size
    values = (marked[:, :width] / world_size).reshape(-1, *like.shape[len(places) :])
    where = torch.stack(indices)
    made = torch.sparse_coo_tensor(where, values, like.shape, is_coalesced=True, check_invariants=False)
    return made.to(like.device, like.dtype)
