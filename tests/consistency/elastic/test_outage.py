"""A meeting folder that is full, read-only or out of inodes when members change: nobody dies, and nothing is lost."""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import laconic
from laconic.consistency.elastic.meeting import Meeting, read_events
from laconic.consistency.elastic.places import folder as folder_module
from laconic.errors import StorageError
from tests.consistency.elastic.trainers import Trainer, assert_alike, until

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(trying again|newcomers wait|left out|cannot be written)"),
]
OPTIONS: dict[str, Any] = {"data": laconic.Samples(256, 32, 30)}


class Disk:
    """The one place that writes, which fails while `full`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
        self.full, self._names = False, names
        self.refused: list[str] = []
        for name in ("create", "append"):
            monkeypatch.setattr(folder_module, name, self._failing(getattr(folder_module, name)))

    def _failing(self, write: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(path: Path, *about: Any, **more: Any) -> Any:
            if self.full and path.name.startswith(self._names):
                self.refused.append(path.name)
                raise StorageError(f"{path} cannot be written: {os.strerror(errno.ENOSPC)}", errno.ENOSPC)
            return write(path, *about, **more)

        return attempt


def _job(folder: Path, **options: Any) -> Any:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    return laconic.elastic(model, optimizer, laconic.Samples(64, 4, 100_000), folder, codec="none", **options)


def _begun(folder: Path, *leave_after: int | None, **options: Any) -> list[Trainer]:
    workers = [Trainer(folder, leave, workers=len(leave_after), **OPTIONS, **options) for leave in leave_after]
    until(lambda: all(worker.calls > 5 or worker.error for worker in workers))
    return workers


def _late_steps_wait_for_the_last_of(workers: list[Trainer]) -> Callable[[Tensor], None]:
    """A `spoil` by which a training is not over before the newcomer, on a crowded machine, has come."""

    def wait(_: Tensor) -> None:
        if len(workers) > 2 and workers[1].calls > 200 and not workers[-1].calls:
            time.sleep(0.05)

    return wait


def test_a_loss_that_cannot_be_published_is_waited_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, "view", "id", "events")
    workers = _begun(tmp_path, 40, None, None)
    disk.full = True
    workers[0].ended()
    until(lambda: len(disk.refused) > 3)
    assert all(worker.is_alive() for worker in workers[1:])
    disk.full = False
    for worker in workers[1:]:
        worker.ended()
    assert_alike(workers[1:])
    assert max(workers[1].digests) == max(workers[2].digests) == 240
    assert "view-00000004.json" in disk.refused or "view-00000003.json" in disk.refused


def test_members_train_on_while_a_newcomer_cannot_be_taken_in(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, "view", "events")
    workers: list[Trainer] = []
    workers += _begun(tmp_path, None, None, spoil=_late_steps_wait_for_the_last_of(workers))
    disk.full = True
    workers.append(Trainer(tmp_path, **OPTIONS))
    until(lambda: disk.refused)
    made = workers[0].calls
    until(lambda: workers[0].calls > made + 10 or workers[0].error)
    assert not workers[2].digests
    disk.full = False
    for worker in workers:
        worker.ended()
    assert_alike(workers)


def test_when_patience_is_over_the_model_is_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = Disk(monkeypatch, "view", "id", "events", "finished")
    workers = _begun(tmp_path, 20, None, outage_s=0.6)
    disk.full = True
    workers[1].join(30)
    error = workers[1].error
    assert isinstance(error, StorageError)
    assert error.errno == errno.ENOSPC
    for text in (r"[worker ", "could not be written for 0.6 s", "model after", "torch.save(model.state_dict(), path)"):
        assert text in str(error)


def test_an_end_that_cannot_be_written_is_written_later(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who was away must read that the training is over; members do not wait for that."""
    disk = Disk(monkeypatch, "finished")
    disk.full = True
    first, second = _begun(tmp_path, None, None)
    until(lambda: disk.refused)
    until(lambda: not (first.is_alive() and second.is_alive()))
    assert first.is_alive() or second.is_alive(), "the coordinator tries again"
    disk.full = False
    first.ended()
    second.ended()
    assert Meeting(tmp_path).finished


def test_events_and_the_end_that_cannot_be_written_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disk = Disk(monkeypatch, "events", "finished")
    disk.full = True
    with pytest.warns(UserWarning, match='"what": "left"'):
        Meeting(tmp_path).record([{"what": "left"}])
    with pytest.warns(UserWarning, match="the training is over"):
        Meeting(tmp_path).finish_within(0.0, 3)
    assert read_events(tmp_path) == []


def test_a_first_worker_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Disk(monkeypatch, "id").full = True
    worker = Trainer(tmp_path)
    worker.join(10)
    assert isinstance(worker.error, StorageError)
    assert "workers cannot meet in" in str(worker.error)


def test_a_first_worker_outlives_one_answer_that_does_not_come(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    number, refused = Meeting.number, list[str]()

    def slow_once(self: Meeting) -> int:
        if not refused:
            refused.append("no answer")
            raise StorageError("no answer in 3 s")
        return number(self)

    monkeypatch.setattr(Meeting, "number", slow_once)
    worker = Trainer(tmp_path, data=laconic.Samples(256, 32, 1))
    worker.ended()
    assert refused
    assert max(worker.digests) == 8


class Readings:
    """Everything that is read in a meeting folder, which fails while `lost`."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.lost, self.refused = False, 0
        for holder, name in ((folder_module.os, "listdir"), (Path, "read_bytes")):
            monkeypatch.setattr(holder, name, self._failing(getattr(holder, name)))

    def _failing(self, read: Callable[..., Any]) -> Callable[..., Any]:
        def attempt(*about: Any, **more: Any) -> Any:
            if self.lost and threading.current_thread().name == "newcomer":
                self.refused += 1
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(about[0]))
            return read(*about, **more)

        return attempt


@pytest.mark.parametrize("outage_s", [60.0, 0.3])
def test_a_newcomer_waits_for_a_folder_that_cannot_be_read(
    outage_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = Readings(monkeypatch)
    job = _job(tmp_path)
    readings.lost = True
    found: list[Any] = []

    def come() -> None:
        try:
            with _job(tmp_path, outage_s=outage_s) as second:
                found.append(second.worker)
        except Exception as error:
            found.append(error)

    newcomer = threading.Thread(target=come, name="newcomer", daemon=True)
    newcomer.start()
    if outage_s < 1:
        newcomer.join(60)
        assert isinstance(found[0], StorageError)
        assert found[0].errno == errno.EACCES
        assert "could not be read for 0.3 s" in str(found[0])
        assert "the model is with the members" in str(found[0])
        job.close()
        return
    until(lambda: readings.refused > 1)
    assert not found
    readings.lost = False
    for _ in job.batches():  # takes it in
        job.step()
        if len(job.members) == 2 or found:
            break
    newcomer.join(60)
    assert found == [2]
    job.close()


@pytest.mark.parametrize("reading", ["number", "newest", "key"])
def test_a_folder_that_cannot_be_read_is_a_storage_error(reading: str, tmp_path: Path) -> None:
    meeting = Meeting(tmp_path / "job")
    (tmp_path / "job").rmdir()
    (tmp_path / "job").touch()
    with pytest.raises(StorageError, match=r"job.* cannot be "):
        getattr(meeting, reading)()


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 64 KB and 40 files."""
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs Linux and root")
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,nr_inodes=40", "laconic", folder])
    if done.returncode:
        pytest.skip("this system does not let us mount")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def _fill(disk: Path) -> None:
    with contextlib.suppress(OSError), open(disk / "fill", "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))


def _take_all_files(disk: Path) -> None:
    with contextlib.suppress(OSError):
        for number in range(100):
            (disk / f"fill{number}").touch()


def _remount(disk: Path, how: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{how}", disk], check=True)


FAULTS: dict[str, tuple[Callable[[Path], None], Callable[[Path], None]]] = {
    "full": (_fill, lambda disk: (disk / "fill").unlink()),
    "out of inodes": (_take_all_files, lambda disk: [path.unlink() for path in disk.glob("fill*")] and None),
    "read-only": (lambda disk: _remount(disk, "ro"), lambda disk: _remount(disk, "rw")),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_real_disk_that_fails_for_a_while(fault: str, small_disk: Path) -> None:
    """One worker leaves and another comes while it fails; the others wait with their last steps until it has come."""
    spoil, mend = FAULTS[fault]
    workers: list[Trainer] = []
    workers += _begun(small_disk / "members", 60, None, None, spoil=_late_steps_wait_for_the_last_of(workers))
    spoil(small_disk)
    workers[0].ended()
    workers.append(Trainer(small_disk / "members", **OPTIONS))
    made = workers[1].calls
    workers[1].join(1.5)
    assert [worker.error for worker in workers] == [None] * 4
    assert workers[1].calls <= made + 1, "no step without a view"
    mend(small_disk)
    for worker in workers[1:]:
        worker.ended()
    assert_alike(workers[1:])
