"""A compressed all-reduce by gathering: every rank sends its whole payload to every other, and all add up all of them.

One round and one encoding, but (P−1) payloads a rank: for few ranks or very small payloads (top-k). Its sum is exactly
that of what was sent, the same bits on every rank. Callers: as `coded.py`.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from laconic.errors import NonFiniteError, PayloadError
from laconic.exchange.coded import Lane, Timings
from laconic.exchange.message import aligned, head_nbytes, pack, unpack
from laconic.exchange.pieces import Piece
from laconic.transports.base import Incoming, Outgoing, Transport


def run_gather(lanes: Sequence[Lane], transport: Transport, *, step: int = 0) -> Timings:
    """Sum every lane's buffer over all ranks, in place: one message of all lanes' payloads to every peer."""
    timings, begun = Timings(), time.perf_counter()
    rank, size = transport.rank, transport.world_size
    detail = " and ".join(f"{lane.buffer.numel()} through {lane.codec}" for lane in lanes)
    transport.begin("all_reduce", "gather", sum(lane.buffer.numel() for lane in lanes), "float32", detail, 1)
    message = pack([_encoded(lane, step * size + rank) for lane in lanes])
    most = head_nbytes(len(lanes)) + sum(aligned(lane.codec.max_nbytes(lane.buffer.numel())) for lane in lanes)
    others = [(rank + hop) % size for hop in range(1, size)]
    recvs = [Incoming(peer, most, torch.uint8, torch.device("cpu"), at_most=True) for peer in others]
    timings.encode_s = time.perf_counter() - begun

    posted = transport.post([Outgoing(peer, message) for peer in others], recvs, 0)
    arrived = {rank: message}
    begun = time.perf_counter()
    for index, peer in enumerate(others):
        arrived[peer] = posted.received(index)
    posted.sent()
    timings.wait_s = time.perf_counter() - begun

    begun = time.perf_counter()
    for lane in lanes:
        lane.buffer.zero_()
    for peer in range(size):  # in order of rank: the same bits everywhere
        try:
            payloads, nbytes = unpack(arrived[peer], len(lanes))
            for lane, payload in zip(lanes, payloads, strict=True):
                if payload is None:
                    lane.buffer.fill_(float("nan"))
                else:
                    lane.codec.decode_add(payload, lane.buffer)
        except PayloadError as error:
            raise PayloadError(f"{transport.where(0)}: peer {peer} sent a bad payload: {error}") from error
        if peer != rank:
            transport.counters.count_received(peer, nbytes)
    timings.decode_s = time.perf_counter() - begun
    timings.sent_nbytes, timings.messages = message.nbytes * len(others), len(others)
    transport.counters.rounds += 1
    transport.end()
    return timings


def _encoded(lane: Lane, draws: int) -> torch.Tensor | None:
    """The payload of a lane, or None when it holds NaN or infinity."""
    numel = lane.buffer.numel()
    out = lane.room(0, Piece(0, numel, False), lane.codec.max_nbytes(numel))
    try:
        if lane.feedback is None:
            return lane.codec.encode(lane.buffer, step=draws, out=out)
        owed = lane.feedback.take_owed()
        if owed is not None:
            lane.buffer += owed
        return lane.feedback.encode(lane.codec, lane.buffer, (0, 0, numel), step=draws, out=out)
    except NonFiniteError:
        return None
