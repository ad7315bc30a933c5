"""Errors in a part of the job: ranks have the job's numbers, and a rank that closes the job leaves its parts, too."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from laconic import schedules
from laconic.errors import PayloadError, PeerLost, TransportError
from laconic.transports.base import Transport
from laconic.transports.executor import run
from laconic.transports.faults import Faulty
from laconic.transports.threads import Hub, ThreadTransport
from laconic.transports.torchdist import TorchTransport
from laconic.transports.world import World
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_mesh import Mesh

COLOURS = [0, 1, 0, 1]


def opened(engine: str) -> Callable[[int], Transport]:
    """Makes the transport of a rank among four; call it on a thread for each."""
    hub, store = Hub(4), dist.HashStore()
    makers: dict[str, Callable[[int], Transport]] = {
        "threads": lambda rank: ThreadTransport(hub, rank, 100.0),
        "gloo": lambda rank: TorchTransport(store, rank, 4, 100.0),
        "zmq": lambda rank: ZmqTransport(store, rank, 4, 100.0),
    }
    return makers[engine]


def on_ranks(work: Callable[[int], object]) -> list[object]:
    """What `work` returns or raises on each of four threads."""
    found: list[object] = [None] * 4

    def each(rank: int) -> None:
        try:
            found[rank] = work(rank)
        except Exception as error:
            found[rank] = error

    threads = [threading.Thread(target=each, args=(rank,), daemon=True) for rank in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return found


def sum_in(part: World) -> None:
    run(schedules.build("all_reduce", "ring", part.world_size, 8), torch.ones(8), part.transport)


@pytest.mark.parametrize("engine", ["threads", "gloo", "zmq"])
def test_a_rank_whose_program_raises_has_left_its_parts(engine: str) -> None:
    """Long before the 100 s of the time-out are over, which would let the threads miss their 60 s."""
    make = opened(engine)

    def work(rank: int) -> None:
        with World(make(rank)) as world:
            part = world.split(COLOURS)
            sum_in(part)
            if rank == 2:
                raise ZeroDivisionError
            sum_in(part)

    found = on_ranks(work)
    assert isinstance(found[2], ZeroDivisionError)
    error = found[0]
    assert isinstance(error, PeerLost), error
    assert (error.rank, error.peer) == (0, 2)
    assert str(error).startswith("[rank 0/4] ring all_reduce")
    assert "peer 2 has left" in str(error)
    assert found[1] is found[3] is None


@pytest.mark.parametrize("engine", ["threads", "gloo", "zmq"])
def test_a_rank_that_leaves_because_of_another_part_names_who_was_lost_there(engine: str) -> None:
    """Rank 1 waits in a row for rank 0, which leaves it because rank 2 is lost in their column."""
    make = opened(engine)

    def work(rank: int) -> None:
        with World(make(rank)) as world:
            column, row = world.split(COLOURS), world.split([0, 0, 1, 1])
            sum_in(column)
            sum_in(row)
            if rank == 2:
                raise ZeroDivisionError
            if rank == 0:
                sum_in(column)
            sum_in(row)

    found = on_ranks(work)
    for rank in (0, 1, 3):
        error = found[rank]
        assert isinstance(error, PeerLost), error
        assert (error.rank, error.peer) == (rank, 2), error
        assert "peer 2 " in str(error)


@pytest.mark.parametrize("engine", ["threads", "gloo", "zmq"])
def test_a_rank_that_leaves_by_an_error_that_names_another_passes_it_on(engine: str) -> None:
    """Rank 0 has heard from a server, on a connection of its own, that rank 3 is lost."""
    make = opened(engine)

    def work(rank: int) -> None:
        with World(make(rank)) as world:
            part = world.split(COLOURS)
            sum_in(part)
            if rank == 0:
                raise PeerLost("the server of rank 3 does not answer", rank=0, peer=3)
            if rank == 2:
                sum_in(part)

    error = on_ranks(work)[2]
    assert isinstance(error, PeerLost), error
    assert (error.rank, error.peer) == (2, 3), error


def test_all_parts_are_told_of_a_loss_before_one_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    """To take leave of a rank that does not answer takes seconds, in which the others' time-outs would end."""
    make, here, order = opened("zmq"), threading.local(), list[str]()

    def noted(name: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(*args: object) -> None:
            if here.rank == 0:
                order.append(name)
            function(*args)

        return call

    monkeypatch.setattr(ZmqTransport, "_tell", noted("tell", ZmqTransport._tell))
    monkeypatch.setattr(Mesh, "close", noted("close", Mesh.close))

    def work(rank: int) -> None:
        here.rank = rank
        with World(make(rank)) as world:
            column, row = world.split(COLOURS), world.split([0, 0, 1, 1])
            sum_in(column)
            sum_in(row)
            if rank == 0:
                raise PeerLost("the server of rank 3 does not answer", rank=0, peer=3)

    on_ranks(work)
    assert order == ["tell"] * 3 + ["close"] * 3


def test_parts_of_parts_and_bad_payloads_have_the_jobs_numbers() -> None:
    hub = Hub(4)

    def work(rank: int) -> None:
        transport = Faulty(ThreadTransport(hub, rank, 100.0), corrupt=lambda message: False)
        part = World(transport).split(COLOURS).split([5, 5])
        assert [part.transport.named(each) for each in range(2)] == ([0, 2] if rank % 2 == 0 else [1, 3])
        call = part.transport.call("all_reduce", "ring", 1, "float32", rounds=2)
        found = call.bad_payload(0, 1 - part.rank, PayloadError("torn"))
        assert found.peer == (rank + 2) % 4
        assert str(found).startswith(f"[rank {rank}/4] ring all_reduce, round 1 of 2: peer {(rank + 2) % 4} sent")

    assert on_ranks(work) == [None] * 4


def test_what_breaks_the_job_breaks_its_parts() -> None:
    whole = ThreadTransport(Hub(1), 0)
    part = whole.split([0])
    whole.break_off(TransportError("the launcher is gone", rank=0))
    with pytest.raises(TransportError, match="the launcher is gone"):
        part.check_usable()


def test_a_store_that_goes_away_while_the_world_is_split_is_a_lost_peer() -> None:
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False, timeout=timedelta(seconds=1))
    with World(TorchTransport(client, 0, 1, 5.0, store_host=0), store=client) as world:
        del server
        with pytest.raises(PeerLost, match=r"\[rank 0/1\]: the store went away while the world was split"):
            world.split([0])
