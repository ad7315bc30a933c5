"""A compressed reduce-scatter: every rank encodes its part of each other rank's share, and sends it straight there.

One round and one encoding whatever P: (P−1)/P of the payload a rank. The owner adds what it decodes to its own part,
which is never encoded, in float32. Caller: `fsdp.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch
from torch import Tensor

from laconic.codecs import Codec
from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.channel import Timings
from laconic.exchange.message import Writer, max_nbytes, unpack
from laconic.exchange.residuals import Residual
from laconic.transports.base import Incoming, Outgoing, Transport


def reduce_scatter_coded(
    pieces: Sequence[tuple[Tensor, Codec, Residual | None]], transport: Transport, *, step: int = 0
) -> Timings:
    """Sum over all ranks row r of every piece into rank r's row r; the other rows are scratch afterwards.

    Args:
        pieces: (P × n float32, codec, residuals over P·n values or None); all share one message a peer.
        step: draws of stochastic codecs differ by step, rank and destination.
    """
    timings, begun = Timings(), time.perf_counter()
    rank, size = transport.rank, transport.world_size
    detail = " and ".join(f"{rows.numel()} through {coder}" for rows, coder, _ in pieces)
    transport.begin("reduce_scatter", "direct", sum(r.numel() for r, _, _ in pieces), "float32", detail, 1)
    others = [(rank + hop) % size for hop in range(1, size)]
    sizes = [coder.max_nbytes(rows.shape[1]) for rows, coder, _ in pieces]
    sends = []
    for peer in others:
        writer = Writer(sizes)
        writer.begin()
        for piece in pieces:
            writer.add(_encoded(*piece, peer, (step * size + rank) * size + peer, writer.room()))
        sends.append(Outgoing(peer, writer.finish()))
    recvs = [Incoming(peer, max_nbytes(sizes), torch.uint8, torch.device("cpu"), at_most=True) for peer in others]
    timings.encode_s = time.perf_counter() - begun

    posted = transport.post(sends, recvs, 0)
    for index, peer in enumerate(others):  # always in the same order: the same bits in every run
        begun = time.perf_counter()
        data = posted.received(index)
        arrived = time.perf_counter()
        try:
            payloads, nbytes = unpack(data, len(pieces))
            for (rows, coder, _), payload in zip(pieces, payloads, strict=True):
                if payload is None:
                    rows[rank].fill_(float("nan"))
                else:
                    coder.decode_add(payload, rows[rank])
        except PayloadError as error:
            raise PayloadError(f"{transport.where(0)}: peer {peer} sent a bad payload: {error}") from error
        transport.counters.count_received(peer, nbytes)
        timings.wait_s += arrived - begun
        timings.decode_s += time.perf_counter() - arrived
    begun = time.perf_counter()
    posted.sent()
    timings.wait_s += time.perf_counter() - begun
    timings.sent_nbytes, timings.messages = sum(send.data.nbytes for send in sends), len(sends)
    transport.counters.rounds += 1
    transport.end()
    return timings


def _encoded(
    rows: Tensor, coder: Codec, residual: Residual | None, peer: int, draws: int, room: Tensor
) -> Tensor | None:
    """The payload of the row for `peer`, in `room`, or None when it holds NaN or infinity."""
    numel = rows.shape[1]
    try:
        if residual is None:
            return coder.encode(rows[peer], step=draws, out=room)
        return residual.encode(coder, rows[peer], (0, peer * numel, (peer + 1) * numel), step=draws, out=room)
    except NonFiniteError:
        return None
