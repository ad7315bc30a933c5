"""Messages over several connections: one order, lost and lagging connections, keys, and how many a link needs."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import laconic
from laconic import schedules
from laconic.errors import BadInput, CollectiveTimeout, PayloadError, PeerLost
from laconic.schedules.link import Link
from laconic.transports import zeromq_stripes
from laconic.transports.executor import run
from laconic.transports.frame import CHUNK_NBYTES
from laconic.transports.launcher import run_local
from laconic.transports.rendezvous import find_place
from laconic.transports.tcp_window import MAX_CONNECTIONS, TcpLimits, chosen_connections, connections_for
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_keys import new_key
from laconic.transports.zeromq_mesh import Patience
from laconic.transports.zeromq_stripes import InOrder
from tests.transports.conformance import contribution, run_conformance, total
from tests.transports.frames import parcel

LIMITS = TcpLimits(6 << 20, 4 << 20)  # Linux


@given(st.permutations(range(12)))
def test_messages_are_taken_in_the_order_of_their_numbers(numbers: list[int]) -> None:
    order: InOrder[int] = InOrder()
    taken: list[int] = []
    for number in numbers:
        ready = order.take(number, number, 10)
        taken += ready
        assert order.held_nbytes == 10 * sum(each >= len(taken) for each in numbers[: numbers.index(number) + 1])
    assert taken == list(range(12))
    with pytest.raises(PayloadError, match="before"):
        order.take(3, 3, 10)


def test_what_is_held_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zeromq_stripes, "MAX_HELD_NBYTES", 100)
    order: InOrder[str] = InOrder()
    assert order.take(1, "b", 100) == []
    with pytest.raises(PayloadError, match="ahead"):
        order.take(2, "c", 1)
    assert order.take(0, "a", 1000) == ["a", "b"]  # what is due is never too large


@pytest.mark.parametrize(
    ("link", "connections"),
    [("loopback", 1), ("100mbit,20ms", 1), ("200mbit,80ms", 3), ("1gbit,80ms", 13), ("10gbit,80ms", MAX_CONNECTIONS)],
)
def test_a_link_has_the_connections_that_fill_it(link: str, connections: int) -> None:
    known = None if link == "loopback" else Link.parse(link)
    assert connections_for(known, LIMITS) == connections
    assert connections_for(known, None) == 1


def test_the_number_is_given_or_in_the_environment_or_the_links(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TcpLimits, "read", lambda: LIMITS)
    monkeypatch.delenv("LACONIC_CONNECTIONS", raising=False)
    fat = Link.parse("200mbit,80ms")
    assert (chosen_connections(None, fat), chosen_connections(5, fat), chosen_connections("auto", None)) == (3, 5, 1)
    monkeypatch.setenv("LACONIC_CONNECTIONS", "7")
    assert (chosen_connections(None, fat), chosen_connections("auto", fat)) == (7, 3)
    for wrong in (0, MAX_CONNECTIONS + 1, -1, "many", 2.0, True, "²"):
        with pytest.raises(BadInput, match="'auto' or a number from 1 to 16"):
            chosen_connections(wrong, None)  # type: ignore[arg-type]
    with pytest.raises(BadInput, match="from 1 to 16"):
        laconic.init(connections=17)


def _conform(key: bytes | None) -> tuple[int, int]:
    place = find_place(30.0)
    assert place.store is not None
    many = 1 if place.rank == 0 else 4  # each rank chooses for itself
    with ZmqTransport(place.store, place.rank, place.world_size, 30.0, key=key, connections=many) as transport:
        run_conformance(transport)
        numel = 9 * CHUNK_NBYTES // 4 + 5
        x = contribution(transport.rank, numel)
        run(schedules.build("all_reduce", "tree", transport.world_size, numel), x, transport)
        assert torch.equal(x, total(transport.world_size, numel))
        return transport.mesh.rejected, max(len(peer.names) for peer in transport.mesh.peers.values())


@pytest.mark.processes
@pytest.mark.parametrize("key", [None, new_key()], ids=["plain", "curve"])
def test_conformance(key: bytes | None) -> None:
    """Rank 0 sends over one connection; the others over four, beside that of short messages."""
    for rejected, heard in run_local(3, _conform, (key,), timeout_s=100):
        assert rejected == 0
        assert 3 <= heard <= 5


class _Road:
    """A TCP forwarder, whose connections can be held up or cut one by one."""

    def __init__(self, port: int) -> None:
        self._target = ("127.0.0.1", port)
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listening.getsockname()[1])
        self.ends: list[tuple[socket.socket, socket.socket]] = []
        self.passed: list[int] = []  # bytes towards the target, by connection
        self.held: set[int] = set()
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                here = self._listening.accept()[0]
                there = socket.create_connection(self._target)
                self.ends.append((here, there))
                self.passed.append(0)
                for pair in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=(len(self.ends) - 1, *pair), daemon=True).start()

    def _pass(self, number: int, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                while number in self.held:
                    time.sleep(0.005)
                target.sendall(data)
                self.passed[number] += len(data) if source is self.ends[number][0] else 0
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self, number: int) -> None:
        for end in self.ends[number]:
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        self.held.clear()
        self._listening.close()
        for number in range(len(self.ends)):
            self.cut(number)


def _look(*transports: ZmqTransport) -> None:
    for each in transports:
        with contextlib.suppress(CollectiveTimeout, PeerLost):
            each.recv_any(0.01)


@contextlib.contextmanager
def _pair(connections: int) -> Iterator[tuple[ZmqTransport, ZmqTransport, _Road]]:
    """A receiver, a sender that has met it by a road, and that."""
    options: dict[str, Any] = {"patience": Patience(linger_s=0.3), "connections": connections}
    with ZmqTransport(None, 0, 2, 10.0, **options) as receiver, ZmqTransport(None, 1, 2, 10.0, **options) as sender:
        road = _Road(receiver.listens_at[1])
        try:
            receiver.advertise("127.0.0.1", road.port)
            sender.add_peer(0, receiver.address)
            deadline = time.monotonic() + 10
            while not (sender.is_connected(0) and receiver.is_connected(1) and sender.has_met(0)):
                assert time.monotonic() < deadline
                _look(receiver, sender)
            yield receiver, sender, road
        finally:
            road.close()


def _send_some(sender: ZmqTransport, count: int) -> None:
    """Long, short and empty messages, each with its number as its tag."""
    for number in range(count):
        numel = (0, 10, 3 * CHUNK_NBYTES, 70_000)[number % 4]
        sender.send_to(0, parcel(torch.full((numel,), number % 251, dtype=torch.uint8), number))


def _received(receiver: ZmqTransport, count: int, first: int = 0) -> None:
    """Check that they arrive whole and in order."""
    for number in range(first, count):
        peer, frame = receiver.recv_any(20)
        assert (peer, frame.header.code) == (1, number)
        assert frame.payload.unique().tolist() in ([], [number % 251])


@pytest.mark.parametrize("connections", [2, 5])
def test_long_and_short_messages_arrive_in_the_order_sent(connections: int) -> None:
    with _pair(connections) as (receiver, sender, road):
        writing = threading.Thread(target=_send_some, args=(sender, 12))
        writing.start()
        _received(receiver, 12)
        writing.join()
        busy = [nbytes for nbytes in road.passed if nbytes > CHUNK_NBYTES]
        assert len(busy) == connections
        assert receiver.mesh.rejected == 0


def test_a_connection_that_lags_holds_up_the_others_and_not_more_memory_than_their_queues() -> None:
    with _pair(4) as (receiver, sender, road):
        _send_some(sender, 4)
        _received(receiver, 4)
        lane = road.passed.index(max(road.passed))
        road.held.add(lane)
        writing = threading.Thread(target=_send_some, args=(sender, 60))  # 46 MB
        writing.start()
        ends, most, came = time.monotonic() + 1.5, 0, 0
        while time.monotonic() < ends:
            with contextlib.suppress(CollectiveTimeout):
                assert receiver.recv_any(0.01)[1].header.code == came
                came += 1
            most = max(stream.order.held_nbytes for stream in receiver.mesh._streams.values())
        assert came < 16  # those before the first piece on the connection that lags
        road.held.clear()
        _received(receiver, 60, came)
        writing.join()
        assert CHUNK_NBYTES < most < zeromq_stripes.MAX_HELD_NBYTES / 2
        assert all(stream.order.held_nbytes == 0 for stream in receiver.mesh._streams.values())


def _send_until_lost(sender: ZmqTransport) -> None:
    for _ in range(200):
        sender.send_to(0, parcel(torch.ones(3 * CHUNK_NBYTES, dtype=torch.uint8), 9)).sent()
        with contextlib.suppress(CollectiveTimeout, PeerLost):
            sender.recv_any(0.02)


@pytest.mark.parametrize("which", ["busiest", "idlest"])
def test_a_peer_that_lost_one_of_several_connections_is_lost(which: str) -> None:
    with _pair(3) as (receiver, sender, road):
        _send_some(sender, 4)
        _received(receiver, 4)
        choose = max if which == "busiest" else min
        road.cut(road.passed.index(choose(road.passed)))
        with pytest.raises(PeerLost, match="its connection broke"):
            _send_until_lost(sender)
        # What was cut in half is not delivered.
        with contextlib.suppress(CollectiveTimeout, PeerLost):
            while True:
                assert receiver.recv_any(0.2)[1].payload.numel() == 3 * CHUNK_NBYTES


def test_a_rank_that_comes_back_begins_a_new_order() -> None:
    options: dict[str, Any] = {"patience": Patience(linger_s=0.3), "connections": 3}
    with ZmqTransport(None, 0, 2, 10.0, **options) as receiver:
        for _ in range(3):
            with ZmqTransport(None, 1, 2, 10.0, **options) as sender:
                sender.add_peer(0, receiver.address)
                deadline = time.monotonic() + 10
                while not (sender.is_connected(0) and receiver.is_connected(1) and sender.has_met(0)):
                    assert time.monotonic() < deadline
                    _look(receiver, sender)
                _send_some(sender, 3)
                _received(receiver, 3)
        assert len(receiver.mesh._streams) <= 2
