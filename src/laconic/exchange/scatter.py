"""A compressed reduce-scatter: every rank encodes its part of each other rank's share, and sends it straight there.

One round and one encoding whatever P: (P−1)/P of the payload a rank. The owner adds what it decodes to its own part,
which is never encoded, in float32. Caller: `fsdp.py`.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.exchange.message import Channel, Writer, decode, detail, max_nbytes, unpack
from laconic.transports.base import Incoming, Outgoing, Timings, Transport
from laconic.transports.rounds import drive, finish


def reduce_scatter_coded(channels: Sequence[Channel], transport: Transport, *, step: int = 0) -> Timings:
    """Sum over all ranks row r of every channel into rank r's row r; the other rows are scratch afterwards.

    Args:
        channels: their buffers are P × n float32, with residuals over P·n values or none; all share one message a peer.
        step: draws of stochastic codecs differ by step, rank and destination.
    """
    rank, size = transport.rank, transport.world_size
    others = [(rank + hop) % size for hop in range(1, size)]
    sizes = [channel.codec.max_nbytes(channel.buffer.shape[1]) for channel in channels]
    recvs = [Incoming(peer, max_nbytes(sizes), torch.uint8, torch.device("cpu"), at_most=True) for peer in others]

    def written(peer: int) -> list[Outgoing]:
        writer = Writer(sizes)
        writer.begin()
        for channel in channels:
            numel = channel.buffer.shape[1]
            site = (0, peer * numel, (peer + 1) * numel)
            draws = (step * size + rank) * size + peer
            writer.add(channel.encode(channel.buffer[peer], site, draws, writer.room()))
        return [Outgoing(peer, writer.finish())]

    def take(index: int, data: Tensor) -> int:
        payloads, nbytes = unpack(data, len(channels))
        for channel, payload in zip(channels, payloads, strict=True):
            decode(channel.codec, payload, channel.buffer[rank], add=True)
        return nbytes

    numel = sum(channel.buffer.numel() for channel in channels)
    with transport.call("reduce_scatter", "direct", numel, "float32", detail(channels), 1) as call:
        # always in the same order: the same bits in every run
        finish(drive(call, 0, (), recvs, take, map(written, others)))
    return call.timings
