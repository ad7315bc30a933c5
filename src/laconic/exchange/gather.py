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
from laconic.exchange.lane import Lane, Steps, Timings, finish
from laconic.exchange.message import Writer, max_nbytes, unpack
from laconic.transports.base import Incoming, Outgoing, Transport


def run_gather(lanes: Sequence[Lane], transport: Transport, *, step: int = 0) -> Timings:
    """Sum every lane's buffer over all ranks, in place: one message of all lanes' payloads to every peer."""
    return GatherExchange(lanes, transport).run(step)


class GatherExchange:
    """The plan and the memory of a gathering of these lanes, kept from step to step.

    Args:
        lanes: what is summed; their buffers may be replaced by others of the same length before every `run`.
        divisor: what the sums are divided by, for means.
    """

    algorithm = "gather"

    def __init__(self, lanes: Sequence[Lane], transport: Transport, divisor: int = 1) -> None:
        rank, size = transport.rank, transport.world_size
        self.lanes = list(lanes)
        self.transport = transport
        self.divisor = divisor
        self.others = [(rank + hop) % size for hop in range(1, size)]
        sizes = [lane.codec.max_nbytes(lane.buffer.numel()) for lane in lanes]
        self.writer = Writer(sizes)
        cpu, most = torch.device("cpu"), max_nbytes(sizes)
        self.recvs = [
            Incoming(peer, most, torch.uint8, cpu, into=torch.empty(most, dtype=torch.uint8), at_most=True)
            for peer in self.others
        ]
        self.numel = sum(lane.buffer.numel() for lane in lanes)
        self.detail = " and ".join(f"{lane.buffer.numel()} through {lane.codec}" for lane in lanes)

    def run(self, step: int = 0) -> Timings:
        """Sum the lanes' buffers over all ranks; draws of stochastic codecs differ by step and rank."""
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
        for lane in self.lanes:
            if self.divisor != 1 and not isinstance(lane.codec, Sparse):
                lane.buffer.div_(self.divisor)
        transport.counters.rounds += 1
        transport.end()
        timings.encode_s = encoded - begun
        timings.wait_s += waited - resumed
        timings.decode_s = time.perf_counter() - waited
        timings.sent_nbytes, timings.messages = message.nbytes * len(self.others), len(self.others)
        return timings

    def _encode(self, draws: int) -> Tensor:
        self.writer.begin()
        for lane in self.lanes:
            room = self.writer.room()
            try:
                if lane.feedback is None:
                    payload = lane.codec.encode(lane.buffer, step=draws, out=room)
                else:
                    lane.pay_owed()
                    site = (0, 0, lane.buffer.numel())
                    payload = lane.feedback.encode(lane.codec, lane.buffer, site, step=draws, out=room)
                self.writer.add(payload)
            except NonFiniteError:
                self.writer.add(None)
        return self.writer.finish()

    def _take(self, peer: int, message: Tensor) -> None:
        """Add one rank's payloads; the first rank's replace what the buffers held."""
        try:
            payloads, nbytes = unpack(message, len(self.lanes))
            for lane, payload in zip(self.lanes, payloads, strict=True):
                if payload is None:
                    lane.buffer.fill_(float("nan"))
                elif isinstance(lane.codec, Sparse):
                    self._add_sparse(lane.codec, payload, lane.buffer, first=peer == 0)
                elif peer == 0:
                    lane.codec.decode(payload, lane.buffer.numel(), out=lane.buffer)
                else:
                    lane.codec.decode_add(payload, lane.buffer)
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
