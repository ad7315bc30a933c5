"""The one suite every engine passes: called with an open transport on every rank of a world, asserts or raises."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from laconic import schedules
from laconic.errors import BadInput
from laconic.transports.base import Incoming, Outgoing, Transport, drive, finish
from laconic.transports.executor import run
from laconic.transports.world import World

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
    check_messages_between_two(transport)
    check_split(transport)


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
        run(schedules.build("broadcast", name, size, numel, root=root), x, transport)
        assert torch.equal(x, contribution(root, numel)), name
    for name in schedules.names("reduce"):
        x = contribution(rank, numel)
        run(schedules.build("reduce", name, size, numel, root=root), x, transport)
        assert rank != root or torch.equal(x, total(size, numel)), name
    for name in schedules.names("reduce_scatter"):
        x = contribution(rank, numel)
        run(schedules.build("reduce_scatter", name, size, numel), x, transport)
        mine = slice(int(edges[rank]), int(edges[rank + 1]))
        assert torch.equal(x[mine], total(size, numel)[mine]), name
    for name in schedules.names("all_gather"):
        x = contribution(rank, numel)
        run(schedules.build("all_gather", name, size, numel), x, transport)
        parts = [contribution(r, numel)[int(edges[r]) : int(edges[r + 1])] for r in range(size)]
        assert torch.equal(x, torch.cat(parts)), name
    for name in schedules.names("all_to_all"):
        x = torch.arange(3 * size) + 1000 * rank
        run(schedules.build("all_to_all", name, size, 3 * size), x, transport)
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


def check_messages_between_two(transport: Transport) -> None:
    """`send` and `recv`: any dtype and shape, in order, counted, and no part of the count of collectives."""
    world, rank = World(transport), transport.rank
    if transport.world_size == 1:
        return
    for numel in (0, 1, 70_001):
        for dtype in (torch.float32, torch.bfloat16, torch.int64):
            if rank == 0:
                world.send(contribution(0, numel, dtype), 1)
                got = world.recv(torch.empty(numel, dtype=dtype), 1)
                assert torch.equal(got, contribution(1, numel, dtype))
            elif rank == 1:
                assert torch.equal(world.recv(torch.empty(numel, dtype=dtype), 0), contribution(0, numel, dtype))
                world.send(contribution(1, numel, dtype), 0)
    if rank == 0:  # several in a row, and layouts that are not contiguous
        before = transport.counters.sent_nbytes.get(1, 0)
        for number in range(5):
            world.send(torch.full((2, 3), float(number)).T, 1)
        assert transport.counters.sent_nbytes[1] - before == 5 * 24
    elif rank == 1:
        for number in range(5):
            assert torch.equal(world.recv(torch.empty(2, 3).T, 0), torch.full((3, 2), float(number)))
    for peer in (-1, rank, transport.world_size):
        with pytest.raises(BadInput, match=f"another rank, got {peer}"):
            world.send(torch.ones(1), peer)
    check_back_to_back(transport)


def check_split(transport: Transport) -> None:
    """Worlds of each colour, at once and again; a part has its own collectives, messages and parts."""
    world, rank = World(transport), transport.rank
    with pytest.raises(BadInput, match="colour of each of"):
        world.split([0] * (transport.world_size + 1))
    for colours in ([r % 2 for r in range(transport.world_size)], [5 - r // 2 for r in range(transport.world_size)]):
        members = [r for r, colour in enumerate(colours) if colour == colours[rank]]
        with world.split(colours) as part:
            assert (part.rank, part.world_size) == (members.index(rank), len(members))
            assert part.engine == world.engine
            x = contribution(rank, 300)
            run(schedules.build("all_reduce", "ring", part.world_size, 300), x, part.transport)
            assert torch.equal(x, torch.stack([contribution(r, 300) for r in members]).sum(0))
            if part.world_size > 1 and part.rank < 2:
                other = members[1 - part.rank]
                if part.rank == 0:
                    part.send(contribution(rank, 9), 1)
                got = part.recv(torch.empty(9), 1 - part.rank)
                assert torch.equal(got, contribution(other, 9))
                if part.rank == 1:
                    part.send(contribution(rank, 9), 0)
            with part.split(list(range(part.world_size))) as alone:
                assert (alone.rank, alone.world_size) == (0, 1)
    check_back_to_back(transport)
