"""A relay joins streams of members that cannot reach each other, and of nobody else."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Iterator

import pytest

from laconic.errors import BadInput, NotAuthorised, StorageError
from laconic.transports import relay
from laconic.transports.relay import RelayedPort, RelayServer
from laconic.transports.zeromq_keys import new_key

KEY = new_key()


@contextlib.contextmanager
def _echo() -> Iterator[tuple[str, int]]:
    """A server that sends back what comes."""
    listening = socket.create_server(("127.0.0.1", 0))

    def serve(connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            while data := connection.recv(1 << 16):
                connection.sendall(data)

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                threading.Thread(target=serve, args=(listening.accept()[0],), daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    with listening:
        yield listening.getsockname()


def _sent_back(port: int, data: bytes) -> bytes:
    with socket.create_connection(("127.0.0.1", port), timeout=20) as visitor:
        threading.Thread(target=visitor.sendall, args=(data,), daemon=True).start()
        found = b""
        while len(found) < len(data) and (more := visitor.recv(1 << 16)):
            found += more
    return found


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture
def server() -> Iterator[RelayServer]:
    with contextlib.closing(RelayServer("127.0.0.1", 0, KEY)) as made:
        yield made


def test_what_comes_at_the_relay_reaches_the_member(server: RelayServer) -> None:
    with _echo() as local, contextlib.closing(RelayedPort(("127.0.0.1", server.port), KEY, 1, local)) as member:
        assert _sent_back(member.port, b"hello") == b"hello"
        data = bytes(range(256)) * 20_000
        assert _sent_back(member.port, data) == data
        others = [threading.Thread(target=_sent_back, args=(member.port, b"x")) for _ in range(20)]
        for other in others:
            other.start()
        for other in others:
            other.join(20)
            assert not other.is_alive()
    member.close()
    deadline = time.monotonic() + 20
    while server._taken and time.monotonic() < deadline:
        time.sleep(0.02)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", member.port), timeout=5)


def test_strangers_get_neither_ports_nor_streams(server: RelayServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HANDSHAKE_S", 1.0)
    with pytest.raises(NotAuthorised, match="refuses member 7: it has another key, or no port left"):
        RelayedPort(("127.0.0.1", server.port), new_key(), 7, ("127.0.0.1", 1))
    with _echo() as local, contextlib.closing(RelayedPort(("127.0.0.1", server.port), KEY, 1, local)) as member:
        idle = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(2 * relay.MAX_STRANGERS)]
        for each in idle[::2]:
            with contextlib.suppress(OSError):
                each.sendall(b"\0" * 100)  # nonsense of the right length
        deadline = time.monotonic() + 30
        while server._strangers and time.monotonic() < deadline:
            time.sleep(0.05)
        assert not server._strangers, "a stranger holds its place for ever"
        assert _sent_back(member.port, b"still") == b"still"
        for each in idle:
            each.close()
    assert not server._waiting


def test_a_member_comes_back_to_its_port(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "AGAIN_S", 0.05)
    port = _free_port()
    first = RelayServer("127.0.0.1", port, KEY)
    with _echo() as local, contextlib.closing(RelayedPort(("127.0.0.1", port), KEY, 1, local)) as member:
        before = member.port
        first.close()
        second = RelayServer("127.0.0.1", port, KEY)
        deadline = time.monotonic() + 30
        while time.monotonic() < deadline:
            with contextlib.suppress(OSError):
                if _sent_back(before, b"again") == b"again":
                    break
            time.sleep(0.05)
        assert member.port == before
        assert _sent_back(before, b"again") == b"again"
        second.close()


def test_strangers_keep_no_member_out(server: RelayServer) -> None:
    with contextlib.ExitStack() as idle, _echo() as local:
        for _ in range(relay.MAX_STRANGERS):
            stranger = idle.enter_context(socket.create_connection(("127.0.0.1", server.port)))
            assert stranger.recv(1), "it is heard"
        with contextlib.closing(RelayedPort(("127.0.0.1", server.port), KEY, 1, local)) as member:
            assert _sent_back(member.port, b"hello") == b"hello"


def _call(port: int, wanted: int, own: bytes) -> tuple[socket.socket, int]:
    """Call a relay as a member does that never says another word; the connection, and the port that it got."""
    sock = socket.create_connection(("127.0.0.1", port), timeout=20)
    nonce, wish = sock.recv(32, socket.MSG_WAITALL), relay._WISH.pack(b"C", wanted, own)
    sock.sendall(wish + relay._code(KEY, nonce, wish))
    return sock, int.from_bytes(sock.recv(2, socket.MSG_WAITALL), "little")


def test_a_member_whose_call_broke_unnoticed_gets_its_port_back() -> None:
    with contextlib.closing(RelayServer("127.0.0.1", _free_port(), KEY)) as server:
        first, port = _call(server.port, 0, b"a" * 16)
        other, elsewhere = _call(server.port, port, b"b" * 16)
        assert elsewhere != port, "a port of another member"
        again, same = _call(server.port, port, b"a" * 16)
        assert same == port
        assert set(server._taken) == {port, elsewhere}
        for each in (first, other, again):
            each.close()


def test_a_relay_that_says_nothing_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(relay, "HANDSHAKE_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent, pytest.raises(StorageError, match="no answer: time-out; is"):
        RelayedPort(silent.getsockname(), KEY, 1, ("127.0.0.1", 1))


def test_bad_places_are_one_sentence(server: RelayServer) -> None:
    with pytest.raises(BadInput, match=r"cannot relay at 127\.0\.0\.1"):
        RelayServer("127.0.0.1", server.port, KEY)
    with pytest.raises(StorageError, match="is `laconic meet --relay` running there"):
        RelayedPort(("127.0.0.1", _free_port()), KEY, 1, ("127.0.0.1", 1))


def test_no_thread_outlives_its_owner(server: RelayServer) -> None:
    with _echo() as local:
        member = RelayedPort(("127.0.0.1", server.port), KEY, 1, local)
        assert _sent_back(member.port, b"x") == b"x"
        member.close()
        member.close()
    server.close()
    assert not [each for each in threading.enumerate() if each.name.startswith("laconic-relay")]


def test_after_a_restart_a_newcomer_does_not_get_the_first_port_which_a_member_comes_back_to() -> None:
    port = _free_port()
    first = []
    for _ in range(4):
        with (
            contextlib.closing(RelayServer("127.0.0.1", port, KEY)) as server,
            _echo() as local,
            contextlib.closing(RelayedPort(("127.0.0.1", server.port), KEY, 1, local)) as held,
        ):
            first.append(held.port)
    assert set(first) != {port + 1}, "whoever comes first after a restart gets the same port"
    assert all(port < each <= port + relay.PORTS for each in first)
