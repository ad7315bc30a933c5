"""The one suite every engine passes: called with an open transport on every rank of a world, asserts or raises."""

from __future__ import annotations

import numpy as np
import torch

from laconic import schedules
from laconic.transports.base import Incoming, Outgoing, Transport
from laconic.transports.executor import run
from laconic.transports.rounds import drive, finish

NUMELS = (0, 1, 5, 1000, 70_001)
DTYPES = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int32, torch.int64, torch.uint8)


def run_conformance(transport: Transport) -> None:
    """All checks, in the same order on every rank."""
    check_every_all_reduce(transport)
    check_dtypes(transport)
    check_other_collectives(transport)
    check_reductions(transport)
    check_counts(transport)
    check_back_to_back(transport)
    check_shorter_messages(transport)


def contribution(rank: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Small whole numbers, different on every rank, whose sums are exact in every dtype."""
    return ((torch.arange(numel) * 7 + rank * 3) % 5).to(dtype)


def total(world_size: int, numel: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.stack([contribution(r, numel, torch.int64) for r in range(world_size)]).sum(0).to(dtype)


def check_every_all_reduce(transport: Transport) -> None:
    for name in schedules.names("all_reduce"):
        for numel in NUMELS:
            x = contribution(transport.rank, numel)
            run(schedules.build("all_reduce", name, transport.world_size, numel), x, transport)
            assert torch.equal(x, total(transport.world_size, numel)), (name, numel)


def check_dtypes(transport: Transport) -> None:
    for dtype in DTYPES:
        for name in ("ring", "butterfly"):
            x = contribution(transport.rank, 37, dtype)
            run(schedules.build("all_reduce", name, transport.world_size, 37), x, transport)
            assert torch.equal(x, total(transport.world_size, 37, dtype)), (name, dtype)


def check_other_collectives(transport: Transport) -> None:
    size, rank, numel = transport.world_size, transport.rank, 103
    root = size - 1
    edges = schedules.bounds(numel, size)
    for name in schedules.names("broadcast"):
        x = contribution(rank, numel)
        run(schedules.broadcast(size, numel, root, name), x, transport)
        assert torch.equal(x, contribution(root, numel)), name
    for name in schedules.names("reduce"):
        x = contribution(rank, numel)
        run(schedules.reduce(size, numel, root, name), x, transport)
        assert rank != root or torch.equal(x, total(size, numel)), name
    for name in schedules.names("reduce_scatter"):
        x = contribution(rank, numel)
        run(schedules.reduce_scatter(size, numel, name), x, transport)
        mine = slice(int(edges[rank]), int(edges[rank + 1]))
        assert torch.equal(x[mine], total(size, numel)[mine]), name
    for name in schedules.names("all_gather"):
        x = contribution(rank, numel)
        run(schedules.all_gather(size, numel, name), x, transport)
        parts = [contribution(r, numel)[int(edges[r]) : int(edges[r + 1])] for r in range(size)]
        assert torch.equal(x, torch.cat(parts)), name
    for name in schedules.names("all_to_all"):
        x = torch.arange(3 * size) + 1000 * rank
        run(schedules.all_to_all(size, 3 * size, name), x, transport)
        assert torch.equal(x, torch.cat([torch.arange(3 * rank, 3 * rank + 3) + 1000 * r for r in range(size)])), name
    gossip = schedules.one_peer_exponential(size, numel, round=0)
    x = contribution(rank, numel)
    run(gossip, x, transport)
    assert gossip.sources is not None
    assert torch.equal(x, torch.stack([contribution(r, numel) for r in gossip.sources[rank]]).sum(0))


def check_reductions(transport: Transport) -> None:
    everyone = torch.stack([contribution(r, 50) for r in range(transport.world_size)])
    expected = {"max": everyone.amax(0), "min": everyone.amin(0), "product": everyone.prod(0)}
    for op, value in expected.items():
        x = contribution(transport.rank, 50)
        run(schedules.ring(transport.world_size, 50), x, transport, op)
        assert torch.equal(x, value), op


def check_counts(transport: Transport) -> None:
    """Counted bytes, messages and rounds are those of the schedule, per peer."""
    for name in schedules.names("all_reduce"):
        schedule = schedules.build("all_reduce", name, transport.world_size, 1001)
        m = schedule.messages
        sent_before = dict(transport.counters.sent_nbytes)
        messages_before = dict(transport.counters.sent_messages)
        got_before = dict(transport.counters.received_nbytes)
        rounds_before = transport.counters.rounds
        run(schedule, contribution(transport.rank, 1001), transport)
        for peer in range(transport.world_size):
            out = (m.src == transport.rank) & (m.dst == peer)
            into = (m.dst == transport.rank) & (m.src == peer)
            sent = transport.counters.sent_nbytes.get(peer, 0) - sent_before.get(peer, 0)
            got = transport.counters.received_nbytes.get(peer, 0) - got_before.get(peer, 0)
            count = transport.counters.sent_messages.get(peer, 0) - messages_before.get(peer, 0)
            assert sent == 4 * int((m.stop - m.start)[out].sum()), (name, peer)
            assert got == 4 * int((m.stop - m.start)[into].sum()), (name, peer)
            assert count == int(out.sum()), (name, peer)
        mine = (m.src == transport.rank) | (m.dst == transport.rank)
        assert transport.counters.rounds - rounds_before == len(np.unique(m.round[mine])), name


def check_back_to_back(transport: Transport) -> None:
    """Many calls in a row, of changing size, do not mix."""
    generator = np.random.default_rng(7)
    names = schedules.names("all_reduce")
    for _ in range(40):
        name, numel = str(generator.choice(names)), int(generator.integers(1, 300))
        x = contribution(transport.rank, numel)
        run(schedules.build("all_reduce", name, transport.world_size, numel), x, transport)
        assert torch.equal(x, total(transport.world_size, numel)), (name, numel)


def check_shorter_messages(transport: Transport) -> None:
    """A receive of at most n bytes takes a shorter message; its length stands in its first byte."""
    if transport.world_size == 1:
        return
    right, left = (transport.rank + 1) % transport.world_size, (transport.rank - 1) % transport.world_size
    for longest in (40, 100_000):
        mine = torch.full((transport.rank + 3,), transport.rank + 3, dtype=torch.uint8)
        incoming = Incoming(left, longest, torch.uint8, torch.device("cpu"), at_most=True)
        found: list[torch.Tensor] = []

        def take(index: int, data: torch.Tensor, found: list[torch.Tensor] = found) -> int:
            found.append(data)
            return int(data[0])

        got = transport.counters.received_nbytes.get(left, 0)
        with transport.call("test", "shorter", longest, "uint8", rounds=1) as call:
            finish(drive(call, 0, [Outgoing(right, mine)], [incoming], take))
        length = int(found[0][0])
        assert length == left + 3
        assert found[0][:length].tolist() == [left + 3] * length
        assert transport.counters.received_nbytes[left] - got == length
