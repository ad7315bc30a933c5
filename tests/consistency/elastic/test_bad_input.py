"""What may be wrong around a job is one sentence with its cure, and nothing is lost by it."""

from __future__ import annotations

import errno
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import laconic
from laconic.cli.status import clocks, collect
from laconic.consistency.elastic.line import Line
from laconic.consistency.elastic.meeting import Meeting, View
from laconic.consistency.elastic.places import folder as folder_module
from laconic.consistency.elastic.places import open_place
from laconic.consistency.elastic.places.server import MeetingServer, PlaceKind
from laconic.errors import PeerLost, StorageError
from laconic.transports.frame import Header
from tests.consistency.elastic.places import Served, free_port, opened
from tests.consistency.elastic.trainers import Trainer, assert_alike, until

pytestmark = pytest.mark.usefixtures("one_thread")


def test_a_newcomer_that_nobody_reaches_says_so_and_the_others_train_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As behind a router without a relay: it reaches the members, and they do not reach it."""
    began = Line.__init__

    def unreachable(self: Line, *given: Any) -> None:
        began(self, *given)
        if threading.current_thread().name == "far":
            self.transport.advertise("127.0.0.1", free_port())
            self.address = self.transport.address

    monkeypatch.setattr(Line, "__init__", unreachable)
    member = Trainer(tmp_path, data=laconic.Samples(256, 32, 200))
    until(lambda: member.calls > 3)
    failed: list[BaseException] = []

    def come() -> None:
        model = torch.nn.Sequential(torch.nn.Linear(40, 48), torch.nn.Tanh(), torch.nn.Linear(48, 4))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        samples = laconic.Samples(256, 32, 200)
        try:
            laconic.elastic(model, optimizer, samples, tmp_path, codec="none", patience_s=0.5, outage_s=1.0)
        except PeerLost as error:
            failed.append(error)

    newcomer = threading.Thread(target=come, name="far")
    newcomer.start()
    newcomer.join(60)
    assert "waits to join view 1: worker 1 at 127.0.0.1 and this worker at" in caplog.text
    (error,) = failed
    assert "name a relay by `laconic join --relay`" in str(error)
    assert "LACONIC_BIND" in str(error)
    assert "\n" not in str(error)
    made = member.calls
    until(lambda: member.calls > made + 3 or member.error)
    assert member.error is None
    member.leave_after = member.calls + 1
    member.ended()


@pytest.mark.parametrize("kind", ["folder", "tcp", "etcd"])
def test_clocks_that_differ_by_hours_change_no_step(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true = time.time
    wrong: dict[threading.Thread, float] = {}
    monkeypatch.setattr(time, "time", lambda: true() + wrong.get(threading.current_thread(), 0.0))
    with opened(kind, tmp_path) as where:
        place = where("clocks")
        workers = [Trainer(place, leave, workers=3, data=laconic.Samples(256, 32, 6)) for leave in (12, None, None)]
        for number, worker in enumerate(workers):
            wrong[worker] = 7200.0 * (1 - number)
        for worker in workers:
            worker.ended()
        assert_alike(workers[1:])
        assert max(workers[1].digests) == 48
        meeting = Meeting(place)
        steps = [each["step"] for each in meeting.events()]
        assert steps == sorted(steps), "events are not in the order in which they happened"
        meeting.close()


def test_lines_are_in_the_order_in_which_etcd_got_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with opened("etcd", tmp_path) as where:
        place, now = open_place(where("order")), time.time_ns()
        for number, hours in enumerate((0, 3, -5, 1)):
            monkeypatch.setattr(time, "time_ns", lambda hours=hours: now + hours * 3600 * 10**9)
            place.append("rows", [str(number)])
        assert place.read("rows") == b"0\n1\n2\n3\n"
        place.close()


def test_who_waits_for_others_says_so_and_is_shown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("laconic.consistency.elastic.watch.REMIND_S", 0.1)
    meeting = Meeting(tmp_path)
    options: dict[str, Any] = {"spoil": lambda _: time.sleep(0.005), "data": laconic.Samples(256, 64, 4)}
    workers = [Trainer(tmp_path, workers=3, **options)]
    until(lambda: "[worker 1] the first step waits for 3 workers: 1 so far" in caplog.text)
    workers.append(Trainer(tmp_path, workers=3, **options))
    for number in (1, 2):
        until(lambda number=number: f"[worker {number}] the first step waits for 3 workers: 2" in caplog.text)  # type: ignore[misc]
    until(lambda: collect(meeting)["waits_for"] == 3)
    assert next(member["step"] for member in collect(meeting)["members"]) == 0
    workers.append(Trainer(tmp_path, **options))
    for worker in workers:
        worker.ended()
    found = collect(meeting)
    assert found["waits_for"] == 0
    assert all(member["seconds_per_step"] > 0.02 for member in found["members"]), "not the exchange alone"
    assert caplog.text.count("the first step waits for") == 3
    meeting.close()


def test_a_clock_that_is_ahead_is_told_of(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    meeting.publish(View(1, ((3, "127.0.0.1:1:00"), (4, "127.0.0.1:2:00")), "a job", 0.0))
    now = time.time()
    for worker, ahead_s in ((3, 7200.0), (4, 0.0)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(time, "time", lambda ahead_s=ahead_s: now + ahead_s)
            meeting.write_status(worker, {"worker": worker})
    (sentence,) = clocks(collect(meeting))
    assert sentence.startswith("the clock of worker 3 is 7")
    assert "set both by NTP" in sentence
    meeting.close()


def test_a_meeting_place_of_another_version_is_told_apart(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def answer(self: MeetingServer, parts: list[bytes]) -> None:
        self._router.send_multipart([parts[0], Header(PlaceKind.ANSWER, sequence=1).pack("no answer")])

    monkeypatch.setattr(MeetingServer, "_answer", answer)
    server = Served(tmp_path)
    place = open_place(server.where())
    with pytest.raises(StorageError, match=r"answers nonsense: .*; is the same version of Laconic there\?"):
        place.read("a")
    place.close()
    server.stop()


@pytest.mark.filterwarnings("ignore:.*(trying again|left out|cannot be written)")
def test_a_full_disk_of_the_meeting_place_is_waited_for_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full, refused = threading.Event(), list[str]()
    create = folder_module.create

    def attempt(path: Path, text: str) -> bool:
        if full.is_set():
            refused.append(path.name)
            raise StorageError(f"{path} cannot be written: No space left on device", errno.ENOSPC)
        return create(path, text)

    monkeypatch.setattr(folder_module, "create", attempt)
    server = Served(tmp_path)
    options: dict[str, Any] = {"data": laconic.Samples(256, 32, 12)}
    workers = [Trainer(server.where(), leave, workers=3, **options) for leave in (20, None, None)]
    until(lambda: all(worker.calls > 3 or worker.error for worker in workers))
    full.set()
    workers[0].ended()
    until(lambda: len(refused) > 1)
    place = open_place(server.where())
    with pytest.raises(StorageError, match="No space left on device; make room on its disk, it need not be restarted"):
        place.create("more", "text")
    place.close()
    full.clear()
    for worker in workers[1:]:
        worker.ended()
    assert_alike(workers[1:])
    assert max(workers[1].digests) == 96
    server.stop()
