"""What killed jobs leave behind goes, and nothing that is used does."""

from __future__ import annotations

import mmap
import os
import socket
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from laconic.transports.leftovers import sweep_shared_memory, sweep_sockets


@pytest.fixture
def folder() -> Iterator[Path]:
    """A short path: a socket's has at most 107 characters."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/tmp") as name:
        yield Path(name)


def _socket(folder: Path, name: str) -> socket.socket:
    place = folder / name
    place.mkdir()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(place / "listener-x"))
    listener.listen()
    return listener


def _age(path: Path) -> None:
    os.utime(path, (time.time() - 3600,) * 2)


def test_only_old_folders_of_dead_sockets_go(folder: Path) -> None:
    for name in ("pymp-dead", "pymp-young", "other-dead", "pymp-mixed"):
        _socket(folder, name).close()
    (folder / "pymp-mixed" / "file").touch()
    (folder / "pymp-empty").mkdir()
    with _socket(folder, "pymp-alive"):
        for each in folder.iterdir():
            if each.name != "pymp-young":
                _age(each)
        assert sweep_sockets(folder) == [folder / "pymp-dead"]
        assert not (folder / "pymp-dead").exists()
        assert len(list(folder.iterdir())) == 5


def test_only_old_segments_that_nobody_has_mapped_go(folder: Path) -> None:
    for name in ("mpich_shm_dead", "mpich_shm_used", "mpich_shm_young", "somebody_elses"):
        (folder / name).write_bytes(bytes(4096))
    with (folder / "mpich_shm_used").open("rb") as file, mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ):
        for each in folder.iterdir():
            if each.name != "mpich_shm_young":
                _age(each)
        assert sweep_shared_memory(folder) == [folder / "mpich_shm_dead"]
    assert len(list(folder.iterdir())) == 3
    assert sweep_shared_memory(folder) == [folder / "mpich_shm_used"]


def test_whoever_listens_is_not_disturbed(folder: Path) -> None:
    """A fork server that gets a connection without a request ends, and with it the job that uses it."""
    with _socket(folder, "pymp-alive") as listener:
        _age(folder / "pymp-alive")
        assert sweep_sockets(folder) == []
        listener.setblocking(False)
        with pytest.raises(BlockingIOError):
            listener.accept()
