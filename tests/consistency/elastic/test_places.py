"""Every meeting place keeps the one promise that views rest on, and says in one sentence what is wrong with it."""

from __future__ import annotations

import base64
import contextlib
import itertools
import json
import shutil
import socket
import ssl
import subprocess
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import certifi
import pytest
import torch
import zmq
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import laconic
from laconic.consistency.elastic.line import Line
from laconic.consistency.elastic.meeting import Meeting, View, event
from laconic.consistency.elastic.membership import found
from laconic.consistency.elastic.places import open_place
from laconic.consistency.elastic.places.base import PLACES, Turns
from laconic.consistency.elastic.places.server import MeetingServer
from laconic.errors import BadInput, StorageError, UnknownName
from laconic.transports.liveness import LostPeer
from laconic.transports.zeromq_keys import KEY_VARIABLE, new_key
from tests.consistency.elastic.places import KINDS, Etcd, Served, answering, free_port, has_etcd, opened
from tests.consistency.elastic.trainers import Trainer, assert_alike, until

pytestmark = [
    pytest.mark.usefixtures("one_thread"),
    pytest.mark.filterwarnings("ignore:.*(trying again|newcomers wait|left out|no answer)"),
]

_jobs = itertools.count()


def test_every_registered_place_is_tried_here() -> None:
    assert set(PLACES.names()) == {*KINDS, "etcds"}, "a place that these tests do not know"


@pytest.fixture(scope="module", params=KINDS)
def where(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], str]]:
    with opened(request.param, tmp_path_factory.mktemp(request.param)) as found:
        yield found


def _view(number: int, *members: int) -> View:
    return View(number, tuple((m, f"127.0.0.1:{m}:00") for m in members), "a job", 0.0)


def test_texts_are_created_once_and_read_as_written(where: Callable[[str], str]) -> None:
    place = open_place(where("texts"))
    assert place.names() == []
    assert place.read("a") is None
    assert place.create("a", "é one\n")
    assert not place.create("a", "two")
    assert place.read("a") == "é one\n".encode()
    place.replace("a", "three")
    place.replace("b", "")
    place.append("rows", ["first", "second"])
    place.append("rows", ["third"])
    assert (place.read("a"), place.read("b")) == (b"three", b"")
    assert place.read("rows") == b"first\nsecond\nthird\n"
    assert sorted(place.names()) == ["a", "b", "rows"]
    assert (place.names("ro"), place.names("x")) == (["rows"], [])
    place.close()
    place.close()


def test_numbers_and_views_are_given_once_to_many_at_a_time(where: Callable[[str], str]) -> None:
    numbers: list[int] = []
    winners: list[int] = []

    def come(worker: int) -> None:
        meeting = Meeting(where("many"))
        numbers.extend(meeting.number() for _ in range(5))
        winners.extend(number for number in range(1, 8) if meeting.publish(_view(number, worker)))
        meeting.close()

    threads = [threading.Thread(target=come, args=(worker,)) for worker in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 21))
    assert sorted(winners) == list(range(1, 8))


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.lists(st.tuples(st.integers(1, 4), st.integers(1, 3)), min_size=1, max_size=12))
def test_nobody_makes_a_view_twice(where: Callable[[str], str], tries: list[tuple[int, int]]) -> None:
    """Workers publish whatever number they believe to be next; the first of each is the one that all read."""
    job = where(f"twice-{next(_jobs)}")  # Hypothesis may try the same twice, too
    meetings = {worker: Meeting(job) for worker in (1, 2, 3)}
    valid: dict[int, View] = {}
    for number, worker in tries:
        view = _view(number, worker, 9)
        made = meetings[worker].publish(view)
        assert made == (valid.setdefault(number, view) == view)
    for meeting in meetings.values():
        highest = max(valid)
        assert meeting.newest() == valid[highest]
        meeting.close()


class _Worker:
    """One worker's part in a change of views, by the code that members run, without a network between them.

    Attributes:
        fate: of what it writes next: done; lost, done and nobody answers; refused, not done; emptied, its place has
            become an empty one, for it alone or for others too.
    """

    def __init__(self, job: str, view: View, number: int) -> None:
        self.meeting, self.view, self.id, self.fate = Meeting(job), view, number, "done"
        self._empty = open_place(f"{job}-emptied")
        self.newcomers: dict[int, object] = {}
        self._leaving: set[int] = set()
        self._write, place = self.meeting._place.create, self.meeting._place
        place.create = self._create  # type: ignore[method-assign]

    def _create(self, name: str, text: str) -> bool:
        made = self.fate != "refused" and self._write(name, text)
        if self.fate in ("lost", "refused"):
            raise StorageError("no answer")
        return made

    def tell(self, member: int, message: object) -> None:
        """To whom it tells the view cannot hear it."""

    def loses(self, members: set[int], fate: str) -> None:
        """Propose a view without these, and enter what is then valid, if it is told."""
        self.fate = fate
        lost = {m: LostPeer(m, self.id, "gone") for m in members & set(self.view.ids)}
        if self.id in self.view.ids and lost:
            full = self.meeting._place
            self.meeting._place = self._empty if fate == "emptied" else full
            with contextlib.suppress(StorageError):
                self.view = Line.propose(self, lost, 0, 0, ())  # type: ignore[arg-type]
            self.meeting._place = full

    def close(self) -> None:
        self.meeting.close()
        self._empty.close()


def test_turns_are_taken_in_the_order_of_asking() -> None:
    """Who asks a place again and again does not keep out who waits."""
    turns, order = Turns(), list[str]()

    def come(name: str) -> None:
        with turns:
            order.append(name)

    waiting = [threading.Thread(target=come, args=(name,)) for name in "ab"]
    with turns:
        for number, thread in enumerate(waiting, 1):
            thread.start()
            until(lambda number=number: len(turns._waiting) == number)  # type: ignore[misc]
    come("again")
    for thread in waiting:
        thread.join(10)
    assert order == ["a", "b", "again"]


_FATES = st.sampled_from(["done", "lost", "refused", "emptied"])
_TURNS = st.lists(st.tuples(st.integers(0, 5), st.sets(st.integers(1, 6), max_size=2), _FATES))


@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(st.integers(1, 3), st.integers(1, 3), _TURNS)
def test_of_two_halves_one_goes_on(where: Callable[[str], str], one: int, other: int, turns: list[Any]) -> None:
    """Members of both halves propose in any order, some lose more of their own half, and answers are lost."""
    job, everyone = where(f"halves-{next(_jobs)}"), range(1, one + other + 1)
    begun = _view(1, *everyone)
    workers = {number: _Worker(job, begun, number) for number in everyone}
    assert workers[1].meeting.publish(begun)
    assert all(worker.meeting.newest() == begun for worker in workers.values())
    first, second = set(everyone[:one]), set(everyone[one:])
    entered: dict[int, set[tuple[int, ...]]] = {}
    for turn, more, fate in [*turns, *((number - 1, set[int](), "done") for number in everyone)]:
        worker = workers[everyone[turn % len(everyone)]]
        apart = second if worker.id in first else first
        worker.loses((apart | more) - {worker.id}, fate)
        entered.setdefault(worker.view.number, set()).add(worker.view.ids)
    assert all(len(views) == 1 for views in entered.values()), "a view was made twice"
    newest = workers[1].meeting.newest()
    assert newest is not None
    assert newest.ids, "nobody goes on"
    assert set(newest.ids) <= first or set(newest.ids) <= second, "both halves go on"
    for worker in workers.values():
        assert worker.meeting.newest() == newest, "who looks finds whether it is out"
        assert worker._empty.names() == [], "something was begun at a place that has lost the job"
        worker.close()


@pytest.mark.parametrize("begun_anew", [False, True])
def test_a_job_that_its_place_has_lost_is_not_begun_again(
    where: Callable[[str], str], begun_anew: bool, caplog: pytest.LogCaptureFixture
) -> None:
    job = f"lost-{begun_anew}"
    meeting, empty = Meeting(where(job)), open_place(where(f"{job}-emptied"))
    with contextlib.suppress(StorageError):  # `laconic meet` lets nobody do it from afar
        meeting.change_list("aa", "ann")
    assert meeting.publish(_view(1, 4))
    assert meeting.publish(_view(2, 4, 5))
    listed = meeting.admitted()
    if begun_anew:  # by a worker that has never been in the job
        for number in (1, 2, 3):
            empty.create(f"view-{number:08d}.json", _view(number, 9).to_json())
        empty.create("finished.json", "{}")
    names, full, meeting._place = sorted(empty.names()), meeting._place, empty
    alone = SimpleNamespace(meeting=meeting, id=6, address="127.0.0.1:6:00")
    for attempt in (
        meeting.number,
        meeting.newest,
        lambda: meeting.publish(_view(3, 4)),
        lambda: meeting.write_status(4, {}),
        lambda: found(alone, "a job", 0.0),  # type: ignore[arg-type]
        *((lambda: meeting.newest(2), lambda: meeting.finished) if begun_anew else ()),
    ):
        with pytest.raises(StorageError, match=r"has lost the job: view 2 of it .* steps go on.*: mount its folder"):
            attempt()
    meeting.read_list()
    assert meeting.admitted() == listed, "who may come is not forgotten with it"
    assert sorted(empty.names()) == names
    meeting._place = full
    assert meeting.newest() == _view(2, 4, 5)
    assert meeting.publish(_view(3, 4))
    assert [record.message.split(" has ")[1][:8] for record in caplog.records] == ["lost the", "view 2 o"]
    meeting.close()
    empty.close()


def test_members_wait_for_a_place_that_has_lost_their_job(
    where: Callable[[str], str], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps go on; a change of members is made when the place is back, and nothing is begun at the empty one."""
    for module in ("meeting", "job"):
        monkeypatch.setattr(f"laconic.consistency.elastic.{module}.STATUS_S", 0.1)
    jobs: list[Any] = []
    options = {"data": laconic.Samples(256, 32, 100_000), "silence_s": 3.0, "prepare": jobs.append}
    workers = [Trainer(where("back"), workers=3, **options) for _ in range(3)]
    until(lambda: len(jobs) == 3 and all(worker.calls > 5 or worker.error for worker in workers))
    full = {job._meeting: job._meeting._place for job in jobs}
    for meeting in full:
        meeting._place = open_place(where("back-emptied"))
    until(lambda: "has lost the job" in caplog.text)
    made = workers[0].calls
    until(lambda: workers[0].calls > made + 10 or workers[0].error)
    workers[2].leave_after = workers[2].calls + 20
    workers[2].ended()
    made = workers[0].calls
    workers[0].join(1.0)
    assert not workers[0].error
    assert workers[0].calls <= made + 1, "no step without a view"
    empty = open_place(where("back-emptied"))
    assert empty.names() == []
    for meeting, place in full.items():
        meeting._place, empty_too = place, meeting._place
        empty_too.close()
    until(lambda: workers[0].calls > made + 10 or workers[0].error)
    for worker in workers[:2]:
        worker.leave_after = worker.calls + 20
        worker.ended()
    assert_alike(workers[:2])
    assert "of the job again" in caplog.text
    for place in (empty, *full.values()):
        place.close()


def test_a_view_whose_answer_was_lost_is_the_workers_own(where: Callable[[str], str]) -> None:
    meeting = Meeting(where("again"))
    assert meeting.publish(_view(1, 4))
    assert meeting.publish(_view(1, 4)), "the second try of the same worker"
    assert not meeting.publish(_view(1, 5))
    meeting.close()


def test_events_statuses_key_and_the_end(where: Callable[[str], str]) -> None:
    meeting = Meeting(where("life"))
    meeting.publish(_view(1, 4))
    meeting.record([event(_view(1, 4), 3, 4, "joined")])
    meeting.record([])
    meeting.report(4, {"step": 3})
    until(lambda: meeting.statuses())
    assert meeting.statuses()[0]["step"] == 3
    assert [found["what"] for found in meeting.events()] == ["joined"]
    assert meeting.key() == meeting.key()
    assert not meeting.finished
    meeting.finish(3)
    assert meeting.finished
    meeting.report(4, {"step": 8})
    meeting.close()
    later = Meeting(where("life"))
    assert later.statuses()[0]["step"] == 8, "where it ended"
    later.close()


def test_views_are_seen_without_waiting(where: Callable[[str], str]) -> None:
    meeting = Meeting(where("seen"))
    assert meeting.seen(0) is None
    meeting.publish(_view(1, 4))
    meeting.publish(_view(2, 4, 5))
    until(lambda: meeting.seen(1) == _view(2, 4, 5))
    assert meeting.seen(2) is None
    meeting.close()
    assert not [thread for thread in threading.enumerate() if thread.name == "laconic-meeting"]


def test_workers_train_through_losses_and_newcomers(where: Callable[[str], str]) -> None:
    place = where("training")
    options = {"data": laconic.Samples(256, 32, 12)}
    workers = [Trainer(place, leave, workers=3, **options) for leave in (20, None, None)]
    until(lambda: workers[1].calls > 5 or workers[1].error)
    workers.append(Trainer(place, **options))
    for worker in workers:
        worker.ended()
    assert_alike(workers[1:3])
    assert max(workers[1].digests) == 96
    meeting = Meeting(place)
    assert meeting.finished
    happened = {found["what"].split(":")[0] for found in meeting.events()}
    assert "joined" in happened
    assert happened & {"left", "lost"}, "a goodbye may be overtaken by the end of its connection"
    meeting.close()


@pytest.mark.parametrize("kind", ["tcp", "etcd"])
def test_steps_go_on_while_the_place_is_away(kind: str, tmp_path: Path) -> None:
    with opened(kind, tmp_path) as where:
        server: Served | Etcd = where.__self__  # type: ignore[attr-defined]
        options = {"data": laconic.Samples(256, 32, 60), "silence_s": 3.0}
        workers = [Trainer(where("away"), None, workers=2, **options) for _ in range(2)]
        until(lambda: workers[0].calls > 5 or workers[0].error)
        server.stop()
        made = workers[0].calls
        until(lambda: workers[0].calls > made + 50 or workers[0].error)
        assert not workers[0].error
        server.start()
        for worker in workers:
            worker.ended()
        assert_alike(workers)


def test_what_a_server_kept_outlives_it(tmp_path: Path) -> None:
    server = Served(tmp_path)
    first = Meeting(server.where())
    assert first.publish(_view(1, 7))
    server.stop()
    with pytest.raises(StorageError, match=r"gave no answer in .* is `laconic meet` running there, with the same key"):
        first.newest()
    server.start()
    assert first.newest() == _view(1, 7)
    assert not first.publish(_view(1, 8))
    first.close()
    server.stop()


def test_another_key_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Served(tmp_path)
    monkeypatch.setattr("laconic.consistency.elastic.places.tcp.ANSWER_S", 0.5)
    monkeypatch.setenv(KEY_VARIABLE, new_key().decode())
    stranger = open_place(server.where())
    with pytest.raises(StorageError, match="with the same key"):
        stranger.create("view-00000001.json", "mine")
    stranger.close()
    assert not (tmp_path / "job").exists()
    server.stop()


def test_nonsense_is_not_answered_and_does_no_harm(tmp_path: Path) -> None:
    server = Served(tmp_path)
    place = open_place(server.where())
    place.create("a", "text")
    sock: zmq.Socket[bytes] = place._connected()  # type: ignore[attr-defined]
    for text in (b"", b"\0" * 64, b"Laco" + b"\1" * 80):
        sock.send(text)
    for name in ("../escape", ".hidden", "", "a" * 65, "a/b"):
        with pytest.raises(StorageError, match="is no name at a meeting place"):
            place.read(name)
    assert place.read("a") == b"text"
    assert not (tmp_path.parent / "escape").exists()
    place.close()
    server.stop()


def test_a_job_of_very_many_views_goes_on(tmp_path: Path) -> None:
    server = Served(tmp_path)
    meeting = Meeting(server.where())
    assert meeting.number() == 1
    for number in range(40_000):
        (tmp_path / "job" / f"id-{number + 1:08d}").touch()
    assert meeting.number() == 40_001
    assert meeting.newest() is None
    meeting.close()
    server.stop()


def test_a_first_view_whose_answer_was_lost_is_still_the_workers_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, lost = Meeting.publish, list[View]()

    def loses_an_answer(self: Meeting, view: View) -> bool:
        made = publish(self, view)
        if not lost:
            lost.append(view)
            raise StorageError("no answer")
        return made

    monkeypatch.setattr(Meeting, "publish", loses_an_answer)
    worker = Trainer(str(tmp_path), data=laconic.Samples(256, 32, 1))
    worker.ended()
    assert lost
    assert max(worker.digests) == 8


@pytest.mark.parametrize("text", [b"{}", b"[]", b"null", b"7", b"<html>", b'{"kvs": [1]}', b'{"kvs": [{}]}'])
def test_what_is_not_etcd_is_told_apart(text: bytes) -> None:
    pytest.importorskip("etcd3gw", reason="etcd's client is not installed")
    with answering(text) as server:
        meeting = Meeting(f"etcd://{server}/job")
        with pytest.raises(StorageError, match=r"is no meeting place|does not answer"):
            meeting.number()
        meeting.close()


@pytest.mark.parametrize(
    ("address", "sentence"),
    [
        ("tcp://host", "needs a host and a port"),
        ("tcp://:5000", "needs a host and a port"),
        ("tcp://host:99999", "needs a host and a port"),
        ("tcp://host:5000/a/b", "is no meeting place; one looks like tcp://host:port/job"),
        ("etcd://", "is no meeting place; one looks like etcd://host:2379/job"),
        ("tcp://192.0.2.1:5000", "needs the job's key; make one with `laconic key FILE`"),
    ],
)
def test_bad_addresses_get_one_sentence(address: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_VARIABLE, raising=False)
    with pytest.raises(BadInput, match=sentence):
        open_place(address)


def test_unknown_places_name_the_valid_ones(tmp_path: Path) -> None:
    with pytest.raises(UnknownName, match=r"redis.*etcd.*folder.*tcp"):
        open_place("redis://host:1/job")
    model = torch.nn.Linear(1, 1)
    with pytest.raises(BadInput, match="elastic needs a place where workers meet"):
        laconic.elastic(model, torch.optim.SGD(model.parameters(), 0.1), laconic.Samples(4, 2), codec="none")


def test_a_script_that_names_another_place_than_join_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = torch.nn.Linear(1, 1)

    def trained(meeting: str) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        laconic.elastic(model, optimizer, laconic.Samples(4, 2), meeting, codec="none").close()

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("LACONIC_MEETING", "etcd://me:secret@host:2379/sum")
    with pytest.raises(BadInput, match="names the meeting place etcd://host:2379/sum, and the script runs/sum: leave"):
        trained("runs/sum")
    assert not (tmp_path / "runs").exists()
    monkeypatch.setenv("LACONIC_MEETING", str(tmp_path / "runs" / "sum"))
    trained("runs/sum")


@pytest.mark.parametrize(
    ("what", "sentence"),
    [("name", "the name 127.0.0.1 cannot be resolved .unknown.: check its spelling"),
     ("refused", "nothing listens at port"), ("silent", "accepts connections: is `laconic meet` running there, with"),
     ("closed", "is it up, and does its firewall let this port through")],
)  # fmt: skip
def test_why_a_place_is_silent_is_told(what: str, sentence: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laconic.consistency.elastic.places.tcp.ANSWER_S", 0.2)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        place = open_place(f"tcp://127.0.0.1:{free_port() if what == 'refused' else silent.getsockname()[1]}/sum")
        if what == "name":
            monkeypatch.setattr(socket, "getaddrinfo", _raising(socket.gaierror(-2, "unknown")))
        if what == "closed":
            monkeypatch.setattr(socket.socket, "connect", _raising(TimeoutError()))
        with pytest.raises(StorageError, match=sentence):
            place.read("a")
        place.close()


def _raising(error: OSError) -> Callable[..., None]:
    def fail(*_: object) -> None:
        raise error

    return fail


def test_a_port_that_is_taken_is_one_sentence(tmp_path: Path) -> None:
    server = Served(tmp_path)
    with pytest.raises(BadInput, match="cannot listen at"):
        MeetingServer(tmp_path, "127.0.0.1", server.port, None)
    server.stop()


def test_a_member_of_etcd_that_is_down_is_skipped(tmp_path: Path) -> None:
    with opened("etcd", tmp_path) as where:
        alive = where("two").removeprefix("etcd://")
        place = open_place(f"etcd://127.0.0.1:1,{alive}")
        assert place.create("a", "b")
        assert place._members[0].port != 1, "the one that answered is asked first"  # type: ignore[attr-defined]
        assert place.read("a") == b"b"
        place.close()
    with pytest.raises(StorageError, match=r"does not answer: 127.0.0.1:1: "):
        open_place("etcd://127.0.0.1:1/two").read("a")


def test_the_password_of_etcd_is_not_shown(tmp_path: Path) -> None:
    pytest.importorskip("etcd3gw", reason="etcd's client is not installed")
    place = open_place("etcd://me:secret@127.0.0.1:1/job")
    assert "secret" not in place.where
    with pytest.raises(StorageError) as caught:
        place.read("a")
    assert "secret" not in json.dumps(str(caught.value))
    with pytest.raises(BadInput) as refused:
        open_place("etcd://me:secret@127.0.0.1:1/a/b")
    assert "secret" not in str(refused.value)


@pytest.fixture
def guarded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Etcd]:
    """An etcd with TLS and a user `ann`, whose password is `secret`."""
    if not has_etcd() or not shutil.which("openssl"):
        pytest.skip("etcd, its client or openssl is not installed")
    certificate, key = tmp_path / "ca.pem", tmp_path / "ca.key"
    subprocess.run(
        ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=127.0.0.1",
         "-addext", "subjectAltName=IP:127.0.0.1", "-keyout", str(key), "-out", str(certificate)],
        check=True, capture_output=True,
    )  # fmt: skip
    server = Etcd(tmp_path / "etcd", (certificate, key))
    trust = ssl.create_default_context(cafile=str(certificate))

    def post(path: str, **asked: object) -> None:
        request = urllib.request.Request(f"https://127.0.0.1:{server.port}/v3/{path}", json.dumps(asked).encode())
        urllib.request.urlopen(request, timeout=10, context=trust).close()

    try:
        for user in ("root", "ann"):
            post("auth/user/add", name=user, password="secret")
        post("auth/role/add", name="root")
        post("auth/user/grant", user="root", role="root")
        post("auth/role/add", name="laconic")
        below = {"key": base64.b64encode(b"laconic/").decode(), "range_end": base64.b64encode(b"laconic0").decode()}
        post("auth/role/grant", name="laconic", perm={"permType": "READWRITE", **below})
        post("auth/user/grant", user="ann", role="laconic")
        post("auth/enable")
        monkeypatch.setenv("LACONIC_ETCD_CA", str(certificate))
        monkeypatch.setenv("REQUESTS_CA_BUNDLE", certifi.where())  # as many machines have it
        yield server
    finally:
        server.stop()


def test_etcd_by_tls_and_a_user_with_one_endpoint_down(guarded: Etcd, monkeypatch: pytest.MonkeyPatch) -> None:
    where = f"127.0.0.1:{free_port()},127.0.0.1:{guarded.port}/sum"
    with contextlib.closing(open_place(f"etcds://ann:secret@{where}")) as place:
        assert place.create("view-00000001.json", "öne")
        assert not place.create("view-00000001.json", "two")
        assert place.read("view-00000001.json") == "öne".encode()
        assert "secret" not in place.where
    for login, said in (("ann:wrong", "authentication failed"), ("", "user name is empty")):
        with contextlib.closing(open_place(f"etcds://{login}@{where}" if login else f"etcds://{where}")) as place:
            with pytest.raises(StorageError, match=said) as refused:
                place.read("view-00000001.json")
            assert "wrong" not in str(refused.value)
    monkeypatch.delenv("LACONIC_ETCD_CA")
    unsure = open_place(f"etcds://ann:secret@{where}")
    with contextlib.closing(unsure), pytest.raises(StorageError, match="CERTIFICATE_VERIFY_FAILED"):
        unsure.read("view-00000001.json")
