"""Who gets to a rank's memory and messages: strangers, other users of the machine, forged addresses; the user's key."""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import socket
import struct
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import zmq

from laconic.errors import CollectiveTimeout, NotAuthorised, PeerLost
from laconic.transports.frame import CHUNK_NBYTES, EngineKind, Header
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_address import Address, identity
from laconic.transports.zeromq_gate import MAX_STRANGERS, Secret, secret_for
from laconic.transports.zeromq_keys import loopback_key, new_key
from laconic.transports.zeromq_mesh import Patience
from laconic.transports.zeromq_round import FAULTS
from tests.transports.frames import parcel
from tests.transports.test_zeromq import pump

# these ranks share a thread: nobody listens to a farewell
OPTIONS: dict[str, Any] = {"patience": Patience(linger_s=0.3)}


def _greeted(address: Address, mechanism: bytes) -> socket.socket:
    """A connection that has said and heard the greeting of ZMTP 3."""
    connection = socket.create_connection((address.host, address.port), timeout=5)
    connection.sendall(b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + bytes(32))
    connection.recv(64)
    return connection


def _resident_nbytes(pid: int) -> int:
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * resource.getpagesize()


@pytest.mark.parametrize("mechanism", [b"NULL", b"PLAIN"])
def test_an_unfinished_message_of_a_stranger_takes_no_memory(mechanism: bytes) -> None:
    """ZeroMQ limits frames only: before handshakes asked for a password, all that was sent here was held."""
    with ZmqTransport(None, 0, 2, 10.0) as transport:
        before = _resident_nbytes(os.getpid())
        ready = b"\x05READY\x0bSocket-Type" + struct.pack(">I", 6) + b"DEALER"
        part = b"\x03" + struct.pack(">Q", 1_000_000) + bytes(1_000_000)  # flag MORE: the message never ends
        with _greeted(Address.parse(transport.address), mechanism) as stranger, contextlib.suppress(OSError):
            stranger.sendall(b"\x04" + bytes([len(ready)]) + ready)
            for _ in range(200):
                stranger.sendall(part)
        assert _resident_nbytes(os.getpid()) - before < 50e6


def test_many_strangers_together_take_bounded_memory_and_members_stay() -> None:
    with ZmqTransport(None, 0, 2, 10.0, **OPTIONS) as server, ZmqTransport(None, 1, 2, 10.0, **OPTIONS) as worker:
        worker.add_peer(0, server.address)
        pump(server, worker)
        before = _resident_nbytes(os.getpid())
        frame = b"\x06" + struct.pack(">Q", CHUNK_NBYTES) + bytes(CHUNK_NBYTES - 1)  # of the handshake, never whole
        strangers = []
        for _ in range(3 * MAX_STRANGERS):
            with contextlib.suppress(ConnectionError):  # the gate may cut off any stranger, at any time
                strangers.append(_greeted(Address.parse(server.address), b"PLAIN"))
                strangers[-1].sendall(frame)
        assert len(strangers) > MAX_STRANGERS
        time.sleep(0.3)
        assert _resident_nbytes(os.getpid()) - before < (MAX_STRANGERS + 40) * 1.1e6
        worker.send_to(0, parcel(torch.ones(3), 1))
        assert server.recv_any(10)[1].header.code == 1
        assert server.is_connected(1)
        assert worker.is_connected(0)
        for stranger in strangers:
            stranger.close()


# other users of the machine, who can read and write the store


@pytest.mark.parametrize("guess", [None, b"", new_key()], ids=["none", "empty", "another"])
def test_whoever_has_read_an_address_but_not_the_key_cannot_end_the_job(guess: bytes | None) -> None:
    """The store is open to all; a fault in rank 1's name used to end the job."""
    with ZmqTransport(None, 0, 2, 10.0, **OPTIONS) as server, ZmqTransport(None, 1, 2, 10.0, **OPTIONS) as worker:
        worker.add_peer(0, server.address)
        pump(server, worker)
        address = Address.parse(server.address)
        context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        spy = context.socket(zmq.DEALER)
        spy.setsockopt(zmq.LINGER, 0)
        spy.setsockopt(zmq.ROUTING_ID, identity(address.token, 1))
        if guess is not None:
            Secret(guess, encrypts=False).client(spy, address)
        spy.connect(address.endpoint)
        for header in (Header(EngineKind.BYE), Header(EngineKind.FAULT, code=FAULTS[PeerLost], subject=1)):
            spy.send(header.pack("the job is over"))
        with pytest.raises(CollectiveTimeout):
            server.recv_any(0.5)
        assert server.mesh.rejected == 0
        assert server.peers == [1]
        worker.send_to(0, parcel(torch.ones(3), 5))
        assert server.recv_any(10)[1].header.code == 5
        context.destroy()


@pytest.mark.parametrize("key", [None, new_key()], ids=["plain", "curve"])
def test_an_address_that_was_changed_or_made_without_the_key_is_refused(key: bytes | None) -> None:
    """Otherwise a rank would give its gradients, and its password, to whoever wrote the address into the store."""
    with ZmqTransport(None, 0, 2, 10.0, key=key) as transport, ZmqTransport(None, 1, 2, 10.0, key=key) as other:
        true = Address.parse(other.address)
        moved = Address(true.host, true.port % 65535 + 1, true.token)
        for forged in (
            moved,
            Secret(b"", False).sealed("127.0.0.1", 9),
            Secret(new_key(), True).sealed("127.0.0.1", 9),
        ):
            with pytest.raises(NotAuthorised, match="made with another key"):
                transport.add_peer(1, str(forged))
        transport.add_peer(1, other.address)


def test_a_password_fits_one_address_only() -> None:
    secret = secret_for(None, "127.0.0.1")
    first, second = secret.sealed("127.0.0.1", 9), secret.sealed("127.0.0.1", 9)
    assert first != second
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    sock = context.socket(zmq.DEALER)
    secret.client(sock, first)
    given = [sock.getsockopt(zmq.PLAIN_USERNAME).rstrip(b"\0"), sock.getsockopt(zmq.PLAIN_PASSWORD).rstrip(b"\0")]
    context.destroy()
    assert secret.admits(first, b"PLAIN", given)
    assert not secret.admits(second, b"PLAIN", given)
    assert not secret.admits(first, b"NULL", [])
    assert not secret.admits(first, b"PLAIN", [b"rank", b""])


def test_refusals_are_logged_and_do_not_fill_the_log(caplog: pytest.LogCaptureFixture) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    with caplog.at_level(logging.WARNING, "laconic.transports"), ZmqTransport(None, 0, 2, 10.0) as transport:
        address = Address.parse(transport.address)
        strangers = [context.socket(zmq.DEALER) for _ in range(15)]
        for stranger in strangers:
            Secret(b"guessed", encrypts=False).client(stranger, address)
            stranger.connect(address.endpoint)
        deadline = time.monotonic() + 10
        while not any("refused 10" in text for text in caplog.messages) and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(0.2)
    context.destroy(linger=0)
    assert [text.split(" so far")[0].split(": ")[1] for text in caplog.messages] == ["refused 1", "refused 10"]
    assert "does not hold the job's key" in caplog.text


# the user's own key


def test_the_users_key_lies_where_only_the_user_can_read_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    key = loopback_key()
    file = tmp_path / "cache" / "laconic" / "loopback.key"
    assert key == file.read_bytes().strip() == loopback_key()
    assert file.stat().st_mode & 0o777 == 0o600
    assert list(file.parent.iterdir()) == [file]
    file.chmod(0o644)  # others may know it by now
    second = loopback_key()
    assert second not in (None, key)
    assert second == (tmp_path / "temporary" / f"laconic-{os.getuid()}" / "loopback.key").read_bytes().strip()
    file.chmod(0o600)
    assert loopback_key() == key
    monkeypatch.setattr("os.getuid", lambda: 12345)  # all folders are another user's
    with pytest.warns(UserWarning, match="no private folder"):
        assert loopback_key() is None


def test_a_process_without_a_home_can_join(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "none" / "file"))
    (tmp_path / "none").touch()
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert loopback_key() is not None


@pytest.mark.filterwarnings("ignore:no private folder")
def test_without_a_place_for_a_key_there_is_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "file"))
    with pytest.warns(UserWarning, match="LACONIC_KEY"):
        assert loopback_key() is None
    with ZmqTransport(None, 0, 2, 10.0, **OPTIONS) as one, ZmqTransport(None, 1, 2, 10.0, **OPTIONS) as two:
        two.add_peer(0, one.address)  # the address alone is then the right to speak
        pump(one, two)
