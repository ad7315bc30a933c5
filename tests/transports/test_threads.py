"""The threads engine passes the shared suite, and shows deadlocks and absent peers as errors."""

from __future__ import annotations

import pytest
import torch

from laconic import schedules
from laconic.errors import BadInput, CollectiveTimeout, Mismatch, PeerLost, UnknownName
from laconic.transports.base import Transport
from laconic.transports.executor import run
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from tests.transports.conformance import run_conformance


@pytest.mark.parametrize("world_size", range(1, 10))
def test_conformance(world_size: int) -> None:
    run_threads(world_size, run_conformance)


def test_ranks_that_call_different_things() -> None:
    def work(transport: Transport) -> str:
        x = torch.ones(10 + transport.rank)
        with pytest.raises((Mismatch, PeerLost)) as caught:
            run(schedules.ring(2, x.numel()), x, transport)
        transport.close()
        return str(caught.value)

    assert any("is in all_reduce by ring of" in text for text in run_threads(2, work, timeout_s=5))


def test_a_peer_that_leaves_and_one_that_never_comes() -> None:
    def leaves(transport: Transport) -> str:
        if transport.rank == 1:
            transport.close()
            return ""
        with pytest.raises(PeerLost, match=r"\[rank 0/2\] ring all_reduce, round 1 of 2: peer 1 has left") as caught:
            run(schedules.ring(2, 4), torch.ones(4), transport)
        assert (caught.value.rank, caught.value.peer, caught.value.round) == (0, 1, 0)
        return "raised"

    assert run_threads(2, leaves) == ["raised", ""]

    def sleeps(transport: Transport) -> None:
        if transport.rank == 0:
            with pytest.raises(CollectiveTimeout, match="peer 1"):
                run(schedules.ring(2, 4), torch.ones(4), transport)

    run_threads(2, sleeps, timeout_s=0.3)


def test_wrong_use() -> None:
    def work(transport: Transport) -> None:
        with pytest.raises(BadInput, match="for 4 contiguous values"):
            run(schedules.ring(1, 4), torch.ones(3), transport)
        with pytest.raises(BadInput, match="for 2 ranks"):
            run(schedules.ring(2, 4), torch.ones(4), transport)
        with pytest.raises(UnknownName, match="max, mean, min, product, sum"):
            run(schedules.ring(1, 4), torch.ones(4), transport, "average")

    run_threads(1, work)


def test_ranks_that_split_differently_are_told() -> None:
    def work(transport: Transport) -> None:
        World(transport).split([0, transport.rank])

    with pytest.raises(Mismatch, match="split into 0,"):
        run_threads(2, work, timeout_s=5)


def test_a_message_of_another_length_or_to_nobody() -> None:
    def unlike(transport: Transport) -> None:
        world = World(transport)
        if transport.rank == 0:
            world.send(torch.ones(3), 1)
        else:
            world.recv(torch.ones(4), 0)

    with pytest.raises(Mismatch, match="peer 0 is in message by direct of 3 × float32 from rank 0 to rank 1"):
        run_threads(2, unlike, timeout_s=5)

    def nobody(transport: Transport) -> None:
        if transport.rank == 0:
            World(transport).recv(torch.ones(4), 1)

    with pytest.raises(CollectiveTimeout, match=r"\[rank 0/2\] direct message, round 1 of 1: nothing from or"):
        run_threads(2, nobody, timeout_s=0.3)


def test_whoever_is_left_names_the_rank_that_was_lost_first() -> None:
    """Rank 2 of a ring waits for rank 1, which has left since it waited for rank 0."""

    def work(transport: Transport) -> int | None:
        if transport.rank == 0:
            transport.close()
            return 0
        with pytest.raises(PeerLost, match="peer 0") as caught:
            run(schedules.ring(4, 8), torch.ones(8), transport)
        transport.close()
        return caught.value.peer

    assert run_threads(4, work, timeout_s=5) == [0, 0, 0, 0]
