"""Channels of selected values, summed by a sparse all-reduce: what was selected is added up without being decoded.

Callers: bucket groups, where that costs less than to gather all payloads (`costs.cheapest_coded`), and users who name
one of its algorithms. Every channel is encoded once, as `gather` does, and its own payload is read back: so residuals
are those of `gather`, and so is the sum, to the bit where the algorithm adds in order of rank.

All channels are one long vector in the messages. Of an exact channel (biases), all values are selected. A channel that
holds NaN or infinity sends NaN as its first value, and becomes NaN as a whole on every rank.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import torch

from laconic.codecs.poison import is_poison
from laconic.codecs.selector import Sparse
from laconic.errors import BadInput
from laconic.exchange.coded import Channel, sizes
from laconic.exchange.costs import SPARSE, is_sparse
from laconic.exchange.sparse import Memory, SparseStream, sparse_steps
from laconic.exchange.sparse_stream import Array
from laconic.transports.base import Steps, Timings, Transport, finish


class SparseExchange:
    """The memory of a sparse all-reduce of these channels by one of SPARSE; the rest as for `CodedExchange`."""

    def __init__(self, channels: Sequence[Channel], transport: Transport, *, algorithm: str, divisor: int = 1) -> None:
        if not is_sparse(sizes(channels)):
            codecs = ", ".join(str(channel.codec) for channel in channels)
            raise BadInput(f"{algorithm} sums what codecs such as topk select, got {codecs}; use direct or gather")
        if algorithm not in SPARSE:
            raise BadInput(f"a sparse exchange goes by {', '.join(SPARSE)}, not by {algorithm}")
        self.channels = list(channels)
        self.transport = transport
        self.algorithm = algorithm
        self.divisor = divisor
        self.starts = np.cumsum([0, *(channel.buffer.numel() for channel in channels)]).tolist()
        most = [0 if c.codec.fine else c.codec.max_nbytes(c.buffer.numel()) for c in channels]
        self._rooms = [torch.empty(nbytes, dtype=torch.uint8) for nbytes in most]
        self._memory: Memory = {}

    def run(self, step: int = 0) -> Timings:
        """Sum the channels' buffers over all ranks; draws of stochastic codecs differ by step and rank."""
        return finish(self.steps(step))

    def steps(self, step: int = 0) -> Steps:
        """As `run`, pausing whenever there is nothing to do but wait."""
        begun, transport = time.perf_counter(), self.transport
        draws = step * transport.world_size + transport.rank
        pairs = [self._selected(i, draws) for i in range(len(self.channels))]
        indices = np.concatenate([where + start for (where, _), start in zip(pairs, self.starts, strict=False)])
        values = np.concatenate([what for _, what in pairs])
        values /= self.divisor
        stream = SparseStream.of(indices, values, self.starts[-1])
        encode_s, timings = time.perf_counter() - begun, Timings()
        if transport.world_size > 1:
            stream, timings = yield from sparse_steps(stream, transport, self.algorithm, memory=self._memory)
        begun = time.perf_counter()
        for channel, start in zip(self.channels, self.starts, strict=False):
            numel = channel.buffer.numel()
            part = stream.part(start, start + numel)
            part.to_dense(channel.buffer)
            if part.first_is_nan and not channel.codec.fine:
                channel.buffer.fill_(float("nan"))
        timings.encode_s += encode_s
        timings.decode_s += time.perf_counter() - begun
        return timings

    def _selected(self, index: int, draws: int) -> tuple[Array, Array]:
        """The indices and values that this rank sends of a channel."""
        channel = self.channels[index]
        numel = channel.buffer.numel()
        if not isinstance(channel.codec, Sparse):
            return np.arange(numel), channel.buffer.cpu().numpy()
        channel.carry()
        payload = channel.encode(channel.buffer, (0, 0, numel), draws, self._rooms[index])
        if is_poison(payload, numel):
            return np.zeros(1, np.int64), np.full(1, np.nan, np.float32)
        where, what = channel.codec.decode_sparse(payload, numel)
        return where.numpy(), what.numpy()
