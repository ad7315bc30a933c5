"""Who is cut off from the others by the network: the majority goes on, and the others come back when it is mended."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.consistency.elastic import reachability
from laconic.consistency.elastic.line import Line
from laconic.consistency.elastic.meeting import Meeting, View, read_events
from laconic.consistency.elastic.reachability import CutOffCheck
from laconic_lab.clusters.cluster import Cluster
from tests.consistency.elastic.trainers import Training, until

pytestmark = pytest.mark.usefixtures("one_thread")

needs_root = pytest.mark.skipif(
    not sys.platform.startswith("linux") or os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("tc"),
    reason="emulated clusters need root on Linux with ip and tc",
)


def train(folder: str, stop: Any) -> dict[str, Any]:
    """Until `stop` says so: how it went."""
    torch.manual_seed(0)
    model = nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.01)
    data = laconic.Samples(640, 64, epochs=100_000)
    numbers = []
    with laconic.elastic(model, optimizer, data, folder, codec="none", workers=4, patience_s=2.0) as job:
        for batch in job.batches():
            if not numbers or numbers[-1] != job.worker:
                numbers.append(job.worker)
            model(torch.ones(len(batch), 8)).square().mean().backward()
            time.sleep(0.02)
            job.step()
            if stop():
                break
        return {"numbers": numbers, "members": len(job.members)}


def _train_until(folder: str) -> dict[str, Any]:
    return train(folder, (Path(folder) / "stop").exists)


def _newest(folder: Path) -> View:
    return Meeting(folder).newest() or View(0, (), "", 0.0)


@needs_root
@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
def test_the_coordinator_loses_its_cable_and_comes_back(tmp_path: Path) -> None:
    with Cluster(hosts=4, link="unlimited") as cluster:
        jobs = []
        for host in range(4):
            jobs.append(cluster.start_on(host, _train_until, (str(tmp_path),)))
            until(lambda host=host: len(_newest(tmp_path).ids) > host)  # type: ignore[misc]
        time.sleep(2.0)  # the deadline is learned
        first = _newest(tmp_path)
        cluster.plug(0, connected=False)
        until(lambda: _newest(tmp_path).number > first.number, 30)
        assert set(_newest(tmp_path).ids) == set(first.ids[1:]), "the majority goes on"
        time.sleep(5.0)  # longer than patience_s
        cluster.plug(0, connected=True)
        until(lambda: len(_newest(tmp_path).ids) == 4, 60)
        time.sleep(0.5)
        (tmp_path / "stop").touch()
        results = [job.results(30)[0] for job in jobs]
    assert [len(each["numbers"]) for each in results] == [2, 1, 1, 1]


class Network:
    """The messages between workers of this process; those in `cut` and the others do not reach each other."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.cut: set[int] = set()
        self._cut_at = 0.0
        self._threads: set[int] = set()
        for name in ("tell", "ask", "meets", "_receive", "reaches", "has_reached", "__init__"):
            monkeypatch.setattr(Line, name, getattr(self, name.strip("_"))(getattr(Line, name)))
        monkeypatch.setattr(reachability, "ask", lambda others, ask=reachability.ask: self._answers(ask(others)))

    def separate(self, *numbers: int) -> None:
        self.cut, self._cut_at = set(numbers), time.monotonic()

    def parts(self, one: int, other: int) -> bool:
        return (one in self.cut) != (other in self.cut)

    def tell(self, inner: Any) -> Any:
        return lambda line, member, message: None if self.parts(line.id, member) else inner(line, member, message)

    def ask(self, inner: Any) -> Any:
        return lambda line, view, *at: None if self.parts(line.id, view.coordinator) else inner(line, view, *at)

    meets = ask

    def receive(self, inner: Any) -> Any:
        def received(line: Line, wait_s: float) -> Any:
            message = inner(line, wait_s)
            return None if message is not None and self.parts(line.id, message.sender) else message

        return received

    def reaches(self, inner: Any) -> Any:
        def reached(line: Line, member: int) -> bool:
            silent = self.parts(line.id, member) and time.monotonic() - self._cut_at > line._silence_s
            return not silent and inner(line, member)

        return reached

    def has_reached(self, inner: Any) -> Any:
        return lambda line, member: not self.parts(line.id, member) and inner(line, member)

    def _answers(self, answers: dict[int, bool]) -> dict[int, bool]:
        is_cut = threading.get_ident() in self._threads
        return {member: each for member, each in answers.items() if not self.cut or (member in self.cut) == is_cut}

    def init(self, inner: Any) -> Any:
        def made(line: Line, meeting: Meeting, number: int, *more: Any) -> None:
            if self.cut and threading.get_ident() in self._threads:
                self.cut.add(number)
            inner(line, meeting, number, *more)

        return made

    def holds(self, worker: threading.Thread) -> None:
        """What this worker does from now on happens on the side that is cut off."""
        self._threads.add(worker.ident or 0)


class _Worker(Training):
    def __init__(self, folder: Path, stop: threading.Event) -> None:
        super().__init__(daemon=True)
        self._folder, self._stop_at = folder, stop
        self.result: dict[str, Any] = {}
        self.start()

    def _train(self) -> None:
        self.result = train(str(self._folder), self._stop_at.is_set)


@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    "cut",
    [
        pytest.param([0], id="coordinator"),
        pytest.param([0, 1], id="half"),
        pytest.param([2], id="member", marks=pytest.mark.slow),
        pytest.param([1, 2, 3], id="all but one", marks=pytest.mark.slow),
    ],
)
def test_whoever_is_cut_off_is_back_when_the_network_is(
    cut: list[int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network, stop = Network(monkeypatch), threading.Event()
    workers: list[_Worker] = []
    for place in range(4):
        workers.append(_Worker(tmp_path, stop))
        until(lambda place=place: len(_newest(tmp_path).ids) > place)  # type: ignore[misc]
    time.sleep(1.5)
    first = _newest(tmp_path)
    for place in cut:
        network.holds(workers[place])
    network.separate(*(first.ids[place] for place in cut))
    until(lambda: _newest(tmp_path).number > first.number, 30)
    going_on, gone = set(_newest(tmp_path).ids), {first.ids[place] for place in cut}
    if len(cut) != 2:  # of two halves either may be first
        assert going_on == (gone if len(cut) > 2 else set(first.ids) - gone), "the majority goes on"
    time.sleep(2.5)  # longer than patience_s
    network.cut.clear()
    until(lambda: len(_newest(tmp_path).ids) == 4 or any(worker.error for worker in workers), 60)
    stop.set()
    for worker in workers:
        worker.join(30)
        assert worker.error is None
        assert worker.result
    assert any("rejoined" in event["what"] for event in read_events(tmp_path))


def test_doubt_is_about_those_who_may_live(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as listening, socket.socket() as closed:
        for each in (listening, closed):
            each.bind(("127.0.0.1", 0))
        listening.listen()
        there, died = (f"127.0.0.1:{each.getsockname()[1]}:{'00' * 32}" for each in (listening, closed))
        closed.close()
        view = View(1, ((1, there), (2, there), (3, there), (4, died)), "job", 0.0)
        assert reachability.ask(dict(view.members[1:])) == {2: True, 3: True, 4: False}
        assert CutOffCheck().suspects(view, 1, 1.0) is False, "all can be reached, or are dead"
        answers = {4: False}
        monkeypatch.setattr(reachability, "ask", lambda others: answers)
        assert CutOffCheck().suspects(view, 1, 1.0) is True, "two of three who may live"
        assert CutOffCheck().suspects(view, 1, -1.0) is False, "patience is over"
        answers[3] = True
        assert CutOffCheck().suspects(view, 1, 1.0) is False, "one of three"


def test_hosts_are_asked_where_many_files_are_open() -> None:
    resource = pytest.importorskip("resource")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 1200:
        pytest.skip("no more than 1200 files may be open here")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 1200), hard))
    files: list[int] = []
    try:
        while not files or files[-1] < 1030:
            files.append(os.open(os.devnull, os.O_RDONLY))
        with socket.socket() as listening:
            listening.bind(("127.0.0.1", 0))
            listening.listen()
            assert reachability.ask({7: f"127.0.0.1:{listening.getsockname()[1]}:{'00' * 32}"}) == {7: True}
    finally:
        for each in files:
            os.close(each)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
