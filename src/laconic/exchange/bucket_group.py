"""Buckets that travel in the same messages: one or several, averaged over all ranks.

Callers: `state.py`. DDP cuts gradients into buckets for float32; of a codec that sends a hundredth of it, several
buckets make one message worth its latency.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from torch import Tensor

from laconic.exchange.auto import GUESS, cheapest_coded, plan_coded
from laconic.exchange.bucket import Bucket
from laconic.exchange.channel import Channel
from laconic.exchange.coded import CodedExchange
from laconic.exchange.exact import Route, wire_nbytes
from laconic.exchange.sparse_exchange import SparseExchange
from laconic.schedules.registry import build
from laconic.transports.base import Transport
from laconic.transports.call import Timings
from laconic.transports.executor import agree, run
from laconic.transports.rounds import Pausing


class BucketGroup:
    """The exchange of these buckets; its plan and messages are kept from step to step."""

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self.buckets = tuple(buckets)
        self._exchange: CodedExchange | SparseExchange | None = None
        self._key: tuple[object, ...] = ()
        self._agreed: set[tuple[Transport, int]] = set()  # which float32 all-reduces everyone is known to be in

    def steps(self, buffers: Sequence[Tensor], route: Route) -> Pausing[tuple[Timings, str]]:
        """Average each bucket's buffer over all ranks, in place, pausing where there is nothing to do but wait.

        Returns:
            Where the time went, and the algorithm that was used.
        """
        transport, algorithm = route.transport, route.algorithm
        if algorithm in ("auto", "native") and all(b.codec is not None and b.codec.exact for b in self.buckets):
            return (yield from self._plain(buffers, transport))
        pairs = list(zip(self.buckets, buffers, strict=True))
        channels = [channel for bucket, buffer in pairs for channel in bucket.load(buffer)]
        if algorithm == "auto":
            once = any(bucket.must_gather for bucket in self.buckets)
            algorithm = cheapest_coded(channels, transport.world_size, route.link or GUESS, once=once)
        timings = yield from self._planned(channels, transport, algorithm, route.hosts).steps(route.step)
        for bucket, buffer in pairs:
            bucket.store(buffer)
        return timings, algorithm

    def _planned(
        self, channels: list[Channel], transport: Transport, algorithm: str, hosts: tuple[int, ...] | None
    ) -> CodedExchange | SparseExchange:
        key = (*map(id, channels), id(transport), algorithm, hosts)
        if self._exchange is None or self._key != key:
            divisor = transport.world_size
            self._exchange = plan_coded(channels, transport, algorithm, hosts, divisor)
            self._key = key
        return self._exchange

    def _plain(self, buffers: Sequence[Tensor], transport: Transport) -> Pausing[tuple[Timings, str]]:
        """float32 by the engine's own all-reduce; all make sure once that they are in the same call."""
        for bucket, buffer in zip(self.buckets, buffers, strict=True):
            bucket.settle(buffer)
        if transport.world_size == 1:
            return Timings(), "native"
        if not transport.has_native:
            return Timings(sent_nbytes=sum(self._ring(buffer, transport) for buffer in buffers)), "ring"
        begun, sent_nbytes = time.perf_counter(), 0
        for buffer in buffers:
            if (transport, buffer.numel()) not in self._agreed:
                agree(transport, "all_reduce", "native", buffer)
                self._agreed.add((transport, buffer.numel()))
            wait = transport.start_native(buffer)
            yield
            wait()
            buffer.div_(transport.world_size)
            sent_nbytes += wire_nbytes(buffer.numel(), transport.world_size, itemsize=buffer.itemsize)
        return Timings(wait_s=time.perf_counter() - begun, sent_nbytes=sent_nbytes), "native"

    @staticmethod
    def _ring(buffer: Tensor, transport: Transport) -> int:
        before = transport.counters.total_sent_nbytes
        run(build("all_reduce", "ring", transport.world_size, buffer.numel()), buffer, transport)
        buffer.div_(transport.world_size)
        return transport.counters.total_sent_nbytes - before
