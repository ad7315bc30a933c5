"""A compressed all-reduce by gathering: every rank sends its whole payload to every other, and all add up all of them.

One round and one encoding, but (P−1) payloads a rank: for few ranks or very small payloads (top-k). Its sum is exactly
that of what was sent, the same bits on every rank. Callers: as `coded.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs.selector import Sparse
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.channel import Channel, Steps, Timings, finish
from laconic.exchange.message import Writer, max_nbytes, unpack
from laconic.transports.base import Incoming, Outgoing, Transport


def run_gather(channels: Sequence[Channel], transport: Transport, *, step: int = 0) -> Timings:
    """Sum every channel's buffer over all ranks, in place: one message of all channels' payloads to every peer."""
    return GatherExchange(channels, transport).run(step)


class GatherExchange:
    """The plan and the memory of a gathering of these channels, kept from step to step.

    Args:
        channels: what is summed; their buffers may be replaced by others of the same length before every `run`.
        divisor: what the sums are divided by, for means.
    """

    algorithm = "gather"

    def __init__(self, channels: Sequence[Channel], transport: Transport, divisor: int = 1) -> None:
        rank, size = transport.rank, transport.world_size
        self.channels = list(channels)
        self.transport = transport
        self.divisor = divisor
        self.others = [(rank + hop) % size for hop in range(1, size)]
        sizes = [channel.codec.max_nbytes(channel.buffer.numel()) for channel in channels]
        self.writer = Writer(sizes)
        cpu, most = torch.device("cpu"), max_nbytes(sizes)
        self.recvs = [
            Incoming(peer, most, torch.uint8, cpu, into=torch.empty(most, dtype=torch.uint8), at_most=True)
            for peer in self.others
        ]
        self.numel = sum(channel.buffer.numel() for channel in channels)
        self.detail = " and ".join(f"{channel.buffer.numel()} through {channel.codec}" for channel in channels)

    def run(self, step: int = 0) -> Timings:
        """Sum the channels' buffers over all ranks; draws of stochastic codecs differ by step and rank."""
        return finish(self.steps(step))

    def steps(self, step: int = 0) -> Steps:
        """As `run`, pausing whenever there is nothing to do but wait."""
        timings, begun = Timings(), time.perf_counter()
        transport = self.transport
        rank, size = transport.rank, transport.world_size
        call = transport.begin("all_reduce", "gather", self.numel, "float32", self.detail, 1)
        message = self._encode(step * size + rank)
        encoded = time.perf_counter()

        posted = transport.post([Outgoing(peer, message) for peer in self.others], self.recvs, 0)
        timings.wait_s = time.perf_counter() - encoded
        yield
        transport.resume(call)
        resumed = time.perf_counter()
        arrived = {rank: message}
        for index, peer in enumerate(self.others):
            arrived[peer] = posted.received(index)
        posted.sent()
        waited = time.perf_counter()

        for peer in range(size):  # in order of rank: the same bits everywhere
            self._take(peer, arrived[peer])
        for channel in self.channels:
            if self.divisor != 1 and not isinstance(channel.codec, Sparse):
                channel.buffer.div_(self.divisor)
        transport.counters.rounds += 1
        transport.end()
        timings.encode_s = encoded - begun
        timings.wait_s += waited - resumed
        timings.decode_s = time.perf_counter() - waited
        timings.sent_nbytes, timings.messages = message.nbytes * len(self.others), len(self.others)
        return timings

    def _encode(self, draws: int) -> Tensor:
        self.writer.begin()
        for channel in self.channels:
            room = self.writer.room()
            try:
                if channel.residual is None:
                    payload = channel.codec.encode(channel.buffer, step=draws, out=room)
                else:
                    channel.carry()
                    site = (0, 0, channel.buffer.numel())
                    payload = channel.residual.encode(channel.codec, channel.buffer, site, step=draws, out=room)
                self.writer.add(payload)
            except NonFiniteError:
                self.writer.add(None)
        return self.writer.finish()

    def _take(self, peer: int, message: Tensor) -> None:
        """Add one rank's payloads; the first rank's replace what the buffers held."""
        try:
            payloads, nbytes = unpack(message, len(self.channels))
            for channel, payload in zip(self.channels, payloads, strict=True):
                if payload is None:
                    channel.buffer.fill_(float("nan"))
                elif isinstance(channel.codec, Sparse):
                    self._add_sparse(channel.codec, payload, channel.buffer, first=peer == 0)
                elif peer == 0:
                    channel.codec.decode(payload, channel.buffer.numel(), out=channel.buffer)
                else:
                    channel.codec.decode_add(payload, channel.buffer)
        except PayloadError as error:
            raise PayloadError(f"{self.transport.where(0)}: peer {peer} sent a bad payload: {error}") from error
        if peer != self.transport.rank:
            self.transport.counters.count_received(peer, nbytes)

    def _add_sparse(self, codec: Sparse, payload: Tensor, buffer: Tensor, *, first: bool) -> None:
        """buffer += values / divisor: only what was selected is touched."""
        indices, values = codec.decode_sparse(payload, buffer.numel())
        if first:
            buffer.zero_()
        buffer.index_add_(0, indices, values.div_(self.divisor))
