"""ZeroMQ ranks, for real: conformance, death, stop and departure, keys, strangers, and messages outside collectives."""

from __future__ import annotations

import contextlib
import os
import re
import resource
import signal
import socket
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import zmq

from laconic import schedules
from laconic.errors import BadInput, CollectiveTimeout, NotAuthorised, PayloadError, PeerLost, TransportError
from laconic.transports.base import Outgoing
from laconic.transports.executor import run
from laconic.transports.frame import CHUNK_NBYTES, EngineKind, Header
from laconic.transports.launcher import LocalJob, run_local
from laconic.transports.rendezvous import find_place
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_address import Address, identity
from laconic.transports.zeromq_gate import Secret, secret_for
from laconic.transports.zeromq_keys import host_to_bind, is_loopback, new_key, read_key
from laconic.transports.zeromq_mesh import Patience
from laconic.transports.zeromq_round import ZmqRound
from tests.transports.conformance import contribution, run_conformance, total
from tests.transports.frames import parcel

pytestmark = pytest.mark.processes


def _open(timeout_s: float = 30.0, **options: Any) -> ZmqTransport:
    place = find_place(timeout_s)
    assert place.store is not None
    return ZmqTransport(place.store, place.rank, place.world_size, timeout_s, **options)


def _all_reduce(transport: ZmqTransport, numel: int, algorithm: str = "ring") -> None:
    x = contribution(transport.rank, numel)
    run(schedules.build("all_reduce", algorithm, transport.world_size, numel), x, transport)
    assert torch.equal(x, total(transport.world_size, numel)), (algorithm, numel)


# conformance


def _conform(key: bytes | None) -> int:
    with _open(key=key) as transport:
        run_conformance(transport)
        _all_reduce(transport, 2 * CHUNK_NBYTES // 4 + 5, "tree")  # three chunks a message
        assert transport.mesh.rejected == 0
        return transport.rank


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 7])
def test_conformance(world_size: int) -> None:
    key = new_key() if world_size == 3 else None
    assert run_local(world_size, _conform, (key,), timeout_s=100) == list(range(world_size))


# ranks that disagree, die, stop or leave


def _disagree(what: str) -> tuple[str, str]:
    with _open(timeout_s=20) as transport:
        _all_reduce(transport, 100)
        odd = transport.rank == 1
        numel = 11 if odd and what == "numel" else 10
        dtype = torch.int32 if odd and what == "dtype" else torch.float32
        algorithm = "tree" if odd and what == "algorithm" else "ring"
        x = torch.ones(numel, dtype=dtype)
        begun = time.monotonic()
        try:
            run(schedules.build("all_reduce", algorithm, transport.world_size, numel), x, transport)
        except TransportError as error:
            assert time.monotonic() - begun < 15, "noticed by the time-out only"
            with pytest.raises(type(error), match="rank 1"):  # broken for good
                _all_reduce(transport, 3)
            return type(error).__name__, str(error)
        return "nothing", ""


@pytest.mark.parametrize("what", ["numel", "dtype", "algorithm"])
def test_mismatch_is_an_error_on_every_rank(what: str) -> None:
    odd = {"numel": "ring of 11 × float32", "dtype": "ring of 10 × int32", "algorithm": "tree of 10 × float32"}[what]
    for kind, text in run_local(3, _disagree, (what,), timeout_s=60):
        assert kind == "Mismatch", text
        assert f"rank 1 is in all_reduce by {odd}" in text or f"rank 1 in all_reduce by {odd}" in text
        assert "all_reduce by ring of 10 × float32" in text


def _hammer(timeout_s: float) -> tuple[str, int | None, int | None, str, float]:
    with _open(timeout_s) as transport:
        store = find_place(timeout_s).store
        assert store is not None
        schedule = schedules.ring(transport.world_size, 100_000)
        x = torch.ones(100_000)
        deadline = time.monotonic() + 40
        try:
            for count in range(1_000_000):
                run(schedule, x, transport)
                x.fill_(1.0)
                if count == 20:
                    store.set(f"going/{transport.rank}", b"1")
                if time.monotonic() > deadline:
                    break
        except TransportError as error:
            return type(error).__name__, error.peer, error.round, str(error), time.time()
        return "nothing", None, None, "", 0.0


@pytest.mark.parametrize("sign", [signal.SIGKILL, signal.SIGSTOP])
def test_a_rank_that_dies_or_stops_is_named(sign: signal.Signals) -> None:
    timeout_s = 12.0
    job = LocalJob(4, _hammer, (timeout_s,))
    dist.PrefixStore("laconic/r0", job.store).wait([f"going/{rank}" for rank in range(4)])
    struck = time.time()
    os.kill(job.processes[2].pid, sign)
    for rank in (0, 1, 3):
        job.pipes[rank].poll(2 * timeout_s)
    with contextlib.suppress(ProcessLookupError):
        os.kill(job.processes[2].pid, signal.SIGKILL)
    outcomes = job.outcomes(timeout_s=10)
    survivors = [o for o in outcomes if o.rank != 2]
    assert len(survivors) == 3
    for outcome in survivors:
        assert outcome.value is not None, outcome
        kind, peer, round, text, when = outcome.value
        assert (kind, peer) == ("PeerLost", 2), text
        assert round is not None
        assert "peer 2 is lost" in text
        assert when - struck < timeout_s, text
        print(f"{sign.name}: rank {outcome.rank} knew after {when - struck:.2f} s: {text}")


def _leave_early() -> str:
    with _open() as transport:
        _all_reduce(transport, 1000)
        if transport.rank == 1:
            return "left"
        with pytest.raises(PeerLost) as caught:
            _all_reduce(transport, 1000)
        assert caught.value.peer == 1
        return str(caught.value)


def test_a_rank_that_closes_has_left() -> None:
    texts = run_local(3, _leave_early)
    assert texts[1] == "left"
    for text in (texts[0], texts[2]):
        assert "peer 1 has left" in text


def test_a_rank_that_never_comes_is_named_and_nothing_is_left_behind() -> None:
    before = threading.active_count()
    for key in (None, new_key()):
        with pytest.raises(CollectiveTimeout, match=r"no address from rank 1 in 0\.2 s"):
            ZmqTransport(dist.HashStore(), 0, 2, 0.2, key=key)
    alone = ZmqTransport(dist.HashStore(), 0, 1, 5.0, key=new_key())
    alone.close()
    alone.close()
    with pytest.raises(TransportError, match="closed"):
        _all_reduce(alone, 3)
    assert threading.active_count() <= before + 1  # pyzmq keeps one thread for the whole process


def _die_at_the_meeting() -> tuple[str, str, float]:
    rank = int(os.environ["RANK"])
    if rank == 2:  # its address is known, and others may be connecting
        ZmqTransport.add_peer = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # type: ignore[method-assign]
    begun = time.monotonic()
    try:
        _open(timeout_s=40).close()
    except TransportError as error:
        return type(error).__name__, str(error), time.monotonic() - begun
    return "met", "", 0.0


def test_a_rank_that_dies_at_the_meeting_is_lost() -> None:
    job = LocalJob(3, _die_at_the_meeting)
    for outcome in job.outcomes(timeout_s=50, ranks=(0, 1)):
        assert outcome.value is not None, outcome
        kind, text, waited_s = outcome.value
        assert kind == "PeerLost", text
        assert re.search(r"peer 2 is lost|peer [01] has left", text)  # left, since it has lost peer 2
        assert waited_s < 30, "noticed by the time-out only"


def _wait_for(transport: ZmqTransport, peer: int) -> None:
    deadline = time.monotonic() + 15
    while not transport.has_met(peer) and time.monotonic() < deadline:
        pass


def test_a_rank_that_dies_in_a_handshake_is_lost_and_not_said_to_have_another_key() -> None:
    with ZmqTransport(None, 0, 2, 20.0) as transport, socket.create_server(("127.0.0.1", 0)) as dying:
        transport.add_peer(1, str(secret_for(None, "127.0.0.1").sealed(*dying.getsockname())))
        for _ in range(2):
            visitor, _ = dying.accept()
            visitor.recv(10)
            visitor.close()
        dying.close()
        with pytest.raises(PeerLost, match="peer 1 is lost: nobody listens at its address"):
            _wait_for(transport, 1)


def test_a_transport_that_is_broken_off_raises_what_it_was_given() -> None:
    with ZmqTransport(dist.HashStore(), 0, 1, 5.0) as transport:
        transport.break_off(PeerLost("the launcher was lost", rank=0))
        with pytest.raises(PeerLost, match="the launcher was lost"):
            _all_reduce(transport, 3)


# keys


def test_keys_come_from_a_private_file_or_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LACONIC_KEY", raising=False)
    assert read_key() is None
    key = new_key()
    assert key != new_key()
    monkeypatch.setenv("LACONIC_KEY", key.decode() + "\n")
    assert read_key() == key
    file = tmp_path / "job.key"
    file.write_bytes(b"another key of the job\n")
    file.chmod(0o600)
    assert read_key(file) == b"another key of the job"
    file.chmod(0o644)
    with pytest.raises(BadInput, match=r"open to every user.*chmod 600"):
        read_key(file)
    with pytest.raises(BadInput, match="cannot be read"):
        read_key(tmp_path / "none")
    monkeypatch.setenv("LACONIC_KEY", "short")
    with pytest.raises(BadInput, match="at least 16"):
        read_key()


def test_plain_traffic_stays_on_loopback() -> None:
    assert is_loopback("127.0.0.5")
    assert is_loopback("::1")
    assert not is_loopback("10.0.0.1")
    with pytest.raises(NotAuthorised, match="LACONIC_KEY"):
        ZmqTransport(dist.HashStore(), 0, 1, 5.0, bind="192.0.2.1")
    with pytest.raises(BadInput, match=r"0\.0\.0\.0"):
        host_to_bind("0.0.0.0")
    with pytest.raises(BadInput, match="cannot bind"):  # allowed, but not an address of this machine
        ZmqTransport(dist.HashStore(), 0, 1, 5.0, bind="192.0.2.1", insecure=True)
    ZmqTransport(dist.HashStore(), 0, 1, 5.0, bind="localhost").close()


def _with_key(keys: list[bytes | None]) -> tuple[str, str]:
    rank = int(os.environ["RANK"])
    try:
        with _open(timeout_s=10, key=keys[rank]) as transport:
            _all_reduce(transport, 1000)
            return "fine", ""
    except TransportError as error:
        return type(error).__name__, str(error)


@pytest.mark.parametrize("odd", [new_key(), None], ids=["wrong key", "no key"])
def test_a_rank_with_another_key_is_refused(odd: bytes | None) -> None:
    outcomes = run_local(2, _with_key, ([new_key(), odd],), timeout_s=60)
    kinds = [kind for kind, _ in outcomes]
    assert "fine" not in kinds
    assert "NotAuthorised" in kinds, outcomes
    assert all(kind in ("NotAuthorised", "PeerLost") for kind in kinds), outcomes


# strangers

_FRAMES = 9_000


def _strain(key: bytes | None) -> tuple[int, int, int]:
    """All-reduce while strangers are at work; returns (calls, rejected messages, growth of memory in bytes)."""
    with _open(timeout_s=20, key=key) as transport:
        store = find_place(20).store
        assert store is not None
        _all_reduce(transport, 20_000)
        store.set(f"address/{transport.rank}", transport.address)
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        calls = 0
        over = torch.zeros(1)
        while not over.item():
            for algorithm in ("ring", "butterfly"):
                _all_reduce(transport, 20_000, algorithm)
                calls += 1
            # rank 0 says when all strangers have spoken and, where they can be, were heard
            if transport.mesh.rejected >= _FRAMES:
                store.set("heard", b"1")
            over.fill_(float(transport.rank == 0 and bool(store.check(["strangers done"]))))
            run(schedules.ring(transport.world_size, 1), over, transport)
        growth = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
        return calls, transport.mesh.rejected, growth


def _raw_garbage(host: str, port: int, count: int) -> None:
    generator = torch.Generator().manual_seed(port)
    for number in range(count):
        noise = bytes(torch.randint(0, 256, (60,), generator=generator, dtype=torch.uint8).tolist())
        with contextlib.suppress(OSError), socket.create_connection((host, port), timeout=5) as connection:
            # noise at once, or after a greeting that looks like ZMTP 3
            connection.sendall(noise if number % 2 else b"\xff" + bytes(8) + b"\x7f\x03" + noise)


def _stranger_frames(address: Address, count: int, secret: Secret | None) -> Iterator[None]:
    """Speak ZMTP well, with the job's secret or without, but malformed or as nobody; hang up on the second call."""
    patience_s = 0.3 if secret is None else 30
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    good = Header(EngineKind.DATA, 1, 1, nbytes=8).pack("ring") + bytes(8)
    for name in (b"", identity(bytes(32), 1), identity(address.token, 77)):
        dealer = context.socket(zmq.DEALER)
        dealer.setsockopt(zmq.LINGER, int(patience_s * 1000))
        dealer.setsockopt(zmq.SNDTIMEO, int(patience_s * 1000))
        if name:
            dealer.setsockopt(zmq.ROUTING_ID, name)
        if secret is not None:
            secret.client(dealer, address)
        dealer.connect(address.endpoint)
        with contextlib.suppress(zmq.Again):
            for number in range(count // 3):
                frames = [good, good[: number % len(good)], b"", bytes(2000), good + b"x"]
                dealer.send_multipart([frames[number % 5]] * (1 + number % 3))
    yield
    context.destroy()


@pytest.mark.parametrize("admitted", [False, True], ids=["strangers", "admitted"])
@pytest.mark.parametrize("key", [None, new_key()], ids=["plain", "curve"])
def test_strangers_and_members_that_speak_nonsense_do_not_disturb(key: bytes | None, admitted: bool) -> None:
    world_size = 3
    job = LocalJob(world_size, _strain, (key,))
    store = dist.PrefixStore("laconic/r0", job.store)
    addresses = [Address.parse(store.get(f"address/{rank}").decode()) for rank in range(world_size)]
    target = addresses[0]
    idle = [socket.create_connection((target.host, target.port), timeout=5) for _ in range(200)]
    _raw_garbage(target.host, target.port, 1000)
    speech = _stranger_frames(target, _FRAMES, secret_for(key, "127.0.0.1") if admitted else None)
    next(speech)
    if admitted:  # nobody else gets through the handshake
        store.wait(["heard"], timedelta(seconds=60))
    list(speech)
    store.set("strangers done", b"1")
    results = job.results(timeout_s=60)
    for connection in idle:
        connection.close()
    calls, rejected, growth = results[0]
    assert calls >= 2
    assert growth < 100e6, growth
    assert rejected >= _FRAMES if admitted else rejected == 0
    assert results[1][1] == results[2][1] == 0


# messages outside collectives


def _talk_and_go() -> int:
    """Rank 0 says much and closes at once; rank 1 listens late, long after heartbeats would have been missed."""
    with _open(patience=Patience(0.1, 0.5)) as transport:
        count = 500
        for number in range(count):
            x = torch.full((20_000,), float(number if transport.rank == 0 else -1))
            if transport.rank == 1 and number == 0:
                time.sleep(1.5)
            run(schedules.build("broadcast", "tree", 2, x.numel()), x, transport)
            assert x[0] == x[-1] == number
        return count


def test_what_was_sent_before_closing_arrives() -> None:
    assert run_local(2, _talk_and_go) == [500, 500]


def pump(*transports: ZmqTransport) -> None:
    """Let transports of one process greet each other."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        for transport in transports:
            with contextlib.suppress(CollectiveTimeout):
                transport.recv_any(0.01)
        if all(len(transport.peers) == len(transports) - 1 for transport in transports):
            return
    raise AssertionError("the transports did not meet")


@pytest.mark.parametrize("key", [None, new_key()], ids=["plain", "curve"])
def test_join_send_receive_and_leave(key: bytes | None) -> None:
    # these ranks share a thread: nobody listens to a farewell
    options: dict[str, Any] = {"key": key, "patience": Patience(linger_s=0.3)}
    with ZmqTransport(None, 0, 3, 10.0, **options) as server, ZmqTransport(None, 1, 3, 10.0, **options) as worker:
        worker.add_peer(0, server.address)  # the server learns of the worker by its hello
        pump(server, worker)
        for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.bool):
            worker.send_to(0, parcel(contribution(1, 33, dtype), 7)).sent()
            peer, (header, _, tensor) = server.recv_any(10)
            assert (peer, header.kind, header.code, tensor.dtype) == (1, EngineKind.PARCEL, 7, dtype)
            assert torch.equal(tensor, contribution(1, 33, dtype))
        large = torch.arange(CHUNK_NBYTES // 2, dtype=torch.float64)  # four chunks
        server.send_to(1, parcel(large, 2**32 - 1))
        server.send_to(1, parcel(large[:0]))
        assert torch.equal(worker.recv_any(10)[1].payload, large)
        assert worker.recv_any(10)[1].payload.numel() == 0
        assert server.counters.sent_nbytes == {1: large.nbytes}
        assert worker.counters.received_nbytes == {0: large.nbytes}
        with ZmqTransport(None, 2, 3, 10.0, **options) as late:
            late.add_peer(0, server.address)
            late.add_peer(1, worker.address)
            pump(server, worker, late)
            late.send_to(0, parcel(torch.ones(2), 1))
            late.send_to(1, parcel(torch.ones(2), 2))
            for each, tag in ((server, 1), (worker, 2)):
                peer, frame = each.recv_any(10)
                assert (peer, frame.header.code) == (2, tag)
        with pytest.raises(CollectiveTimeout, match="nothing came"):
            server.recv_any(0.3)
        assert server.peers == [1]
        with pytest.raises(PeerLost, match="peer 2 has left"):
            server.send_to(2, parcel(torch.ones(1), 0))
        with pytest.raises(BadInput, match="contiguous"):
            server.send_to(1, parcel(torch.ones(2, 2), 0))
        worker.drop_peer(0)
        with pytest.raises(PeerLost, match="not a peer"):
            worker.send_to(0, parcel(torch.ones(1), 0))
        with pytest.raises(PeerLost, match="every peer has left"):
            server.recv_any(10)


def test_a_send_that_nobody_takes_ends_although_the_peer_has_sent_something() -> None:
    options: dict[str, Any] = {"patience": Patience(linger_s=0.0)}
    with ZmqTransport(None, 0, 2, 1.0, **options) as sender, ZmqTransport(None, 1, 2, 1.0, **options) as idle:
        idle.add_peer(0, sender.address)
        pump(sender, idle)
        idle.post(idle.point(1, 0, 4, "uint8"), [Outgoing(0, torch.zeros(4, dtype=torch.uint8))], (), 0)
        while not sender.mesh.peers[1].queue:
            sender.mesh.take_in()
        large = torch.zeros(100 * CHUNK_NBYTES, dtype=torch.uint8)  # more than waits unread anywhere
        call = sender.point(0, 1, large.numel(), "uint8")
        with pytest.raises(CollectiveTimeout, match="peer 1"):
            sender.post(call, [Outgoing(1, large)], (), 0).sent()


# the wire


def test_a_peer_that_took_the_last_message_and_left_before_its_memory_was_free_is_not_lost() -> None:
    """ZeroMQ's word that memory is free comes by a thread of Python's, which a busy machine lets wait."""
    store, free = dist.HashStore(), threading.Event()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(ZmqTransport, store, 1, 2)
        with ZmqTransport(store, 0, 2) as transport:
            other.result().close()
            peer = transport.peer(1, None)
            while not peer.left:
                transport.mesh.take_in()
            threading.Timer(0.2, free.set).start()
            ZmqRound(transport, [(peer, zmq.MessageTracker(free))], (), 0).sent()
            assert free.is_set()
            with pytest.raises(PeerLost, match="peer 1 has left"):
                ZmqRound(transport, [(peer, zmq.MessageTracker(threading.Event()))], (), 0).sent()


def test_addresses_are_checked() -> None:
    token = "00" * 32
    for text in ("", "host", "host:1:2", f":1:{token}", f"host:0:{token}", f"host:x:{token}", f"host:1:{token}00"):
        with pytest.raises(PayloadError):
            Address.parse(text)
    six = Address("::1", 7, bytes(32))
    assert Address.parse(str(six)) == six
    assert six.endpoint == "tcp://[::1]:7"


def test_a_peer_can_be_added_and_dropped_again_and_again() -> None:
    """The monitors of closed connections go on for a moment: the next connection's must not share a name with them."""
    options: dict[str, Any] = {"patience": Patience(linger_s=0.0)}
    with ZmqTransport(None, 0, 2, 10.0, **options) as server, ZmqTransport(None, 1, 2, 10.0, **options) as worker:
        for _ in range(300):
            worker.add_peer(0, server.address)
            worker.drop_peer(0)


def test_a_rank_has_room_for_hundreds_of_peers() -> None:
    with ZmqTransport(None, 0, 200, 10.0, patience=Patience(linger_s=0.0)) as transport:
        nobody = str(secret_for(None, "127.0.0.1").sealed("127.0.0.1", 1))
        for rank in range(1, 200):
            transport.add_peer(rank, nobody)
        assert len(transport.peers) == 199


def test_a_transport_whose_thread_cannot_start_is_an_error_and_no_endless_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start"):
        ZmqTransport(None, 0, 2, 10.0)


def _greet_and_wait(address: str) -> None:
    with ZmqTransport(None, 1, 2, 60.0) as transport:
        transport.add_peer(0, address)
        with contextlib.suppress(CollectiveTimeout):
            transport.recv_any(60.0)


@pytest.mark.processes
def test_a_peer_that_has_died_is_dropped_at_once() -> None:
    """Its farewell is not waited for, although nobody has looked at its connection since it broke."""
    with ZmqTransport(None, 0, 2, 10.0, patience=Patience(linger_s=30.0)) as server:
        job = LocalJob(1, _greet_and_wait, (server.address,))
        try:
            deadline = time.monotonic() + 60
            while not server.is_connected(1) and time.monotonic() < deadline:
                with contextlib.suppress(CollectiveTimeout, PeerLost):
                    server.recv_any(0.01)
            assert server.is_connected(1)
        finally:
            job.kill()
        begun = time.monotonic()
        server.drop_peer(1)
        assert time.monotonic() - begun < 10
