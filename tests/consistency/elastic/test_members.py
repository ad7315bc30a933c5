"""The meeting folder, messages and replicas: what an elastic group is made of."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.consistency.elastic import line
from laconic.consistency.elastic.meeting import Meeting, View, event, read_events
from laconic.consistency.elastic.messages import MemberKind, pack, unpack
from laconic.consistency.elastic.replica import Replica, StepWork, digest
from laconic.errors import BadInput, PayloadError, PeerLost, UnknownName
from laconic.transports.launcher import LocalJob
from laconic.transports.zeromq import ZmqTransport
from laconic.transports.zeromq_mesh import Patience
from laconic.workloads.order import SampleLedger
from tests.consistency.elastic.trainers import Training
from tests.transports.frames import parcel, travelled


def _view(number: int, *members: int) -> View:
    return View(number, tuple((m, f"127.0.0.1:{m}:00") for m in members), "a job", 0.0)


def test_of_two_views_with_one_number_only_the_first_counts(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    assert meeting.newest() is None
    assert meeting.publish(_view(1, 1, 2))
    assert not meeting.publish(_view(1, 2))
    assert meeting.publish(_view(2, 2))
    assert meeting.newest() == meeting.newest(1) == _view(2, 2)
    assert meeting.newest(2) is None
    assert meeting.finished is False
    meeting.finish(7)
    assert meeting.finished


def test_numbers_and_views_are_given_once_to_many_at_a_time(tmp_path: Path) -> None:
    numbers: list[int] = []
    winners: list[int] = []

    def come(worker: int) -> None:
        meeting = Meeting(tmp_path)
        numbers.extend(meeting.number() for _ in range(20))
        winners.extend(number for number in range(1, 20) if meeting.publish(_view(number, worker)))

    threads = [threading.Thread(target=come, args=(worker,)) for worker in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == list(range(1, 121))
    assert sorted(winners) == list(range(1, 20))
    assert not list(tmp_path.glob(".*")), "temporary files stay behind"


def test_events_are_read_even_when_the_last_line_is_cut_off(tmp_path: Path) -> None:
    meeting = Meeting(tmp_path)
    meeting.record([event(_view(3, 1), 40, 2, "lost: its connection broke", 1)])
    with open(tmp_path / "events.jsonl", "a") as file:
        file.write('{"seconds": 1.0, "st')
    (found,) = read_events(tmp_path)
    assert (found["step"], found["rank"], found["what"], found["lost"], found["view"]) == (
        40, 2, "lost: its connection broke", 1, 3,
    )  # fmt: skip
    assert read_events(tmp_path / "nowhere") == []


def test_messages_round_trip_and_strangers_are_refused() -> None:
    message = unpack(5, travelled(pack(MemberKind.MEAN, 7, 3, 1 << 63, 1, body=torch.arange(3.0))))
    assert (message.sender, message.kind, message.view, message.step) == (5, MemberKind.MEAN, 7, 3)
    assert (message.detail, message.flag) == (1 << 63, 1)
    assert torch.equal(message.body, torch.arange(3.0))
    assert unpack(1, travelled(pack(MemberKind.JOIN, 1, 0, text="somewhere"))).text == "somewhere"
    with pytest.raises(PayloadError):
        unpack(1, parcel(torch.ones(3)))
    with pytest.raises(PayloadError):
        View.parse('{"number": 1}')


def _line(folder: Path, number: int) -> contextlib.closing[line.Line]:
    return contextlib.closing(line.Line(Meeting(folder), number, 5.0))


@pytest.mark.parametrize("greeted", [False, True])
def test_a_newcomer_that_was_forgotten_without_a_goodbye_is_heard_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, greeted: bool
) -> None:
    monkeypatch.setattr(line, "RECONNECT_S", 0.3)
    with _line(tmp_path, 0) as old, _line(tmp_path, 1) as new:
        view = View(1, ((0, old.address),), "job", 0.0)
        old.view = view
        asked = new.ask(view)
        until = time.monotonic() + 30
        while 1 not in old.transport.peers or (greeted and not asked):
            old.next(0.01)
            asked = new.invitation(0.01) is None and new.ask(view)
            assert time.monotonic() < until
        old.transport.mesh.peers.pop(1).disconnect(linger=False)
        old.newcomers.clear()
        while 1 not in old.newcomers:
            old.next(0.01)
            new.invitation(0.01)
            new.ask(view)
            assert time.monotonic() < until, "it asks a worker that does not know it"


def _trained(make: Any, steps: int) -> Replica:
    torch.manual_seed(steps)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 3))
    model[0].bias.requires_grad_(False)
    optimizer = make([p for p in model.parameters() if p.requires_grad])
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    replica = Replica(model, optimizer, SampleLedger(100, 10), scheduler)
    for step in range(steps):
        model(torch.randn(5, 6))
        gradient = torch.randn(replica.numel, generator=torch.Generator().manual_seed(step))
        StepWork(replica).apply(gradient, 1, (0,))
    return replica


@pytest.mark.parametrize(
    "make",
    [
        lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, nesterov=True),
        lambda p: torch.optim.Adam(p, 0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, 0.01),
    ],
)
def test_a_newcomer_goes_on_with_the_same_bits(make: Any) -> None:
    old, new = _trained(make, 5), _trained(make, 0)
    new.load(old.save())
    for _ in range(3):
        mean = torch.randn(old.numel)
        for replica in (old, new):
            StepWork(replica).apply(mean.clone(), 1, (0,))
    assert digest(old.weights.values) == digest(new.weights.values)
    for ours, theirs in zip(old.model.state_dict().values(), new.model.state_dict().values(), strict=True):
        assert torch.equal(ours, theirs)
    assert old.optimizer.param_groups[0]["lr"] == new.optimizer.param_groups[0]["lr"]
    assert old.ledger.state() == new.ledger.state()


def test_states_that_are_cut_off_or_of_another_model_are_refused() -> None:
    sgd = lambda p: torch.optim.SGD(p, 0.1)  # noqa: E731
    model = nn.Linear(2, 2)
    with pytest.raises(PayloadError, match=r"another model, .*not float32 of shape \(6,\)"):
        Replica(model, sgd(model.parameters()), SampleLedger(1, 1)).load(_trained(sgd, 0).save())
    own = _trained(sgd, 0)
    block = own.save()
    own.load(block)
    for cut in (0, 7, 20, block.numel() - 16):
        with pytest.raises(PayloadError):
            own.load(block[:cut])
    own.extra["unfit"] = {1, 2}
    with pytest.raises(BadInput, match="set"):
        own.save()


def _elastic(folder: Path, model: nn.Module, **options: Any) -> Any:
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    settings = {"data": laconic.Samples(8, 4), "codec": "none"} | options
    return laconic.elastic(model, optimizer, meeting=folder, **settings)


def test_wrong_use_gets_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="workers ≥ 1"):
        _elastic(tmp_path / "a", nn.Linear(2, 1), workers=0)
    with pytest.raises(BadInput, match="epochs ≥ 0"):
        laconic.Samples(8, 4, epochs=-1)
    with pytest.raises(UnknownName, match="unknown option of elastic 'worker'; did you mean 'workers'"):
        _elastic(tmp_path / "a", nn.Linear(2, 1), worker=2)
    with pytest.raises(BadInput, match="at most 64 workers"):
        _elastic(tmp_path / "a", nn.Linear(2, 1), workers=65)
    with pytest.raises(BadInput, match="krum with f=1 needs 5 workers or more, not 2"):
        _elastic(tmp_path / "a", nn.Linear(2, 1), workers=2, consistency="robust(krum, f=1)")
    with pytest.raises(BadInput, match="float32"):
        _elastic(tmp_path / "a", nn.Linear(2, 1).double())
    job = _elastic(tmp_path / "b", nn.Linear(2, 1))
    with pytest.raises(BadInput, match=r"trains .* parameters"):
        _elastic(tmp_path / "b", nn.Linear(3, 1))
    job.close()
    with pytest.raises(BadInput, match="no longer"):
        _ = job.steps
    with pytest.raises(PeerLost, match="begin at another meeting place"):
        _elastic(tmp_path / "b", nn.Linear(2, 1), patience_s=0.3)


@pytest.mark.parametrize("way", ["sync", "local(4)"])
def test_a_step_without_a_batch_gets_one_sentence(way: str, tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    with _elastic(tmp_path, model, consistency=way) as job:
        with pytest.raises(BadInput, match=r"loop over batches\(\), once for each batch"):
            job.step()
        for batch in job.batches():
            model(torch.ones(len(batch), 2)).mean().backward()
            assert job.step()
            with pytest.raises(BadInput, match="once for each batch"):
                job.step()
        assert job.steps == 2


def test_who_leaves_in_the_middle_of_a_block_has_the_weights_of_its_start(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    before = model.weight.detach().clone()
    with _elastic(tmp_path, model, consistency="local(2)") as job:
        model(torch.ones(len(next(job.batches())), 2)).mean().backward()
        assert job.step()
        assert not torch.equal(model.weight, before)
    assert torch.equal(model.weight, before)


def test_who_comes_after_the_end_has_nothing_to_do(tmp_path: Path) -> None:
    for expected in (True, False):
        model = nn.Linear(2, 1)
        told = contextlib.nullcontext() if expected else pytest.warns(UserWarning, match="has finished")
        with told, _elastic(tmp_path, model) as job:
            for batch in job.batches():
                model(torch.ones(len(batch), 2)).mean().backward()
                assert job.step()
            assert job.finished is expected
            assert job.is_over is not expected


def test_who_comes_after_the_end_is_told_so_and_its_script_ends_as_usual(tmp_path: Path) -> None:
    _finish_job(tmp_path)
    with pytest.warns(UserWarning, match="nothing is left to train"):
        job = _elastic(tmp_path, nn.Linear(2, 1))
    assert (job.worker, job.is_first, job.members, job.view, job.steps) == (0, False, (), 0, 0)
    job.load_state_dict(job.state_dict())
    with job, job.busy():
        assert list(job.batches()) == []
    assert (job.finished, job.is_over) == (False, True)


def test_who_was_given_up_as_the_job_ended_is_told_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(line, "LOOK_S", 0.0)
    job, meeting = _elastic(tmp_path, nn.Linear(2, 1)), Meeting(tmp_path)
    founded = meeting.newest()
    assert founded is not None
    meeting.publish(View(2, ((7, founded.members[0][1]),), founded.job, 0.0))
    meeting.finish(2)
    with job:
        with pytest.warns(UserWarning, match="nothing is left to train"):
            assert list(job.batches()) == []
        assert (job.finished, job.is_over, job.worker, job.steps) == (False, True, 0, 0)


def _finish_job(folder: Path) -> None:
    model = nn.Linear(2, 1)
    with _elastic(folder, model) as job:
        for batch in job.batches():
            model(torch.ones(len(batch), 2)).mean().backward()
            assert job.step()


@pytest.mark.parametrize(
    ("make", "way"),
    [
        (torch.optim.SGD, {}),
        (torch.optim.Adam, {}),
        (torch.optim.Adam, {"consistency": "local(3)"}),
        (torch.optim.Adam, {"consistency": "local(2)", "codec": "onebit"}),
        (torch.optim.Adam, {"consistency": "block_momentum(2)"}),
        (torch.optim.Adam, {"consistency": "robust(krum)", "codec": "topk(0.01)"}),
    ],
    ids=lambda value: getattr(value, "__name__", None) or " ".join(value.values()) or "sync",
)
def test_one_worker_equals_the_plain_optimiser(make: Any, way: dict[str, str], tmp_path: Path) -> None:
    x = torch.randn(40, 40)
    weights = []
    for elastic in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 32), nn.Tanh(), nn.Linear(32, 1))
        optimizer = make(model.parameters(), lr=0.05)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        options = {"data": laconic.Samples(40, 8, epochs=2, seed=4), "meeting": tmp_path}
        if elastic:
            with laconic.elastic(model, optimizer, scheduler=scheduler, **options, **way) as job:
                for batch in job.batches():
                    model(x[batch]).square().mean().backward()
                    assert job.step()
                assert (job.steps, job.epoch) == (10, 2)
                assert [record.step for record in job.records] == list(range(10))
        else:
            ledger = SampleLedger(40, 8, 4)
            while ledger.epoch < 2:
                optimizer.zero_grad()
                model(x[ledger.shares(1)[0]]).square().mean().backward()
                optimizer.step()
                scheduler.step()
                ledger.commit(1, [0])
        weights.append(torch.cat([p.detach().reshape(-1) for p in model.parameters()]))
    assert torch.equal(*weights)


def test_who_joins_while_a_line_closes_does_not_keep_it_open() -> None:
    """A stopped coordinator wakes, is fenced, and closes; newcomers that had asked it to join say hello meanwhile."""
    wait = Patience(linger_s=1.0)
    closing, silent, newcomer = (ZmqTransport(None, rank, 1, 10.0, patience=wait) for rank in (1, 2, 3))
    closing.add_peer(2, silent.address)  # never says thank you, so that closing takes its second
    thread = threading.Thread(target=closing.close, daemon=True)
    thread.start()
    newcomer.add_peer(1, closing.address)
    thread.join(timeout=10)
    assert not thread.is_alive(), "close() waits for ever"
    silent.close()
    newcomer.close()


class _Worker(Training):
    """A worker of an elastic job in a thread of its own; `at`: what it does before its steps, by their count."""

    def __init__(
        self, folder: Path, workers: int, at: dict[int, Any], stop: threading.Event, begin_after_s: float = 0.0
    ) -> None:
        super().__init__(daemon=True)
        self._folder, self._workers, self._at, self._stop_at = folder, workers, at, stop
        self._begin_after_s = begin_after_s
        self.job: Any = None
        self.steps = 0
        self.start()

    def _train(self) -> None:
        model = nn.Linear(2, 1)
        options = {"data": laconic.Samples(64, 4, epochs=10_000), "workers": self._workers, "patience_s": 2.0}
        with _elastic(self._folder, model, **options) as job:
            job._deadline.floor_s = 1.0  # a crowded machine
            self.job = job
            time.sleep(self._begin_after_s)
            for batch in job.batches():
                self._at.get(self.steps, lambda job: None)(job)
                if self._stop_at.is_set():
                    return
                model(torch.ones(len(batch), 2)).mean().backward()
                time.sleep(0.01)  # leaves the cores to others
                self.steps += job.step()


def _until(true: Callable[[], bool], what: str, limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not true():
        assert time.monotonic() < deadline, what
        time.sleep(0.01)


def _go_on(workers: list[_Worker], steps: int = 20) -> None:
    for worker in workers:
        goal = worker.steps + steps
        _until(lambda worker=worker, goal=goal: worker.steps >= goal or worker.error, "no steps any more")  # type: ignore[misc]
        assert worker.error is None


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize("blocked", ["newcomer", "coordinator"])
def test_who_blocks_in_the_first_step_with_a_newcomer_is_lost(blocked: str, tmp_path: Path) -> None:
    """Its connection stands and its heart beats, but no gradient comes."""
    stop, wake, joins = threading.Event(), threading.Event(), threading.Event()
    block = {0: lambda job: wake.wait(60)} if blocked == "newcomer" else {}

    def block_with_newcomer(job: Any) -> None:
        if blocked == "coordinator" and len(job.members) == 3 and not wake.is_set():
            joins.set()
            wake.wait(60)

    first = _Worker(tmp_path, 2, dict.fromkeys(range(100_000), block_with_newcomer), stop)
    _until(lambda: first.job is not None, "the first comes in")
    second = _Worker(tmp_path, 2, {}, stop)
    workers = [first, second]
    try:
        _go_on(workers)
        third = _Worker(tmp_path, 2, block, stop)
        workers.append(third)
        stuck = third if blocked == "newcomer" else first
        others = [worker for worker in workers if worker is not stuck]
        _until(lambda: third.job is not None and (blocked == "newcomer" or joins.is_set()), "the third comes in")
        number = stuck.job.worker
        _go_on(others)
        assert not wake.is_set()
        assert number not in others[0].job.members
        lost = {event["rank"]: event["what"] for event in read_events(tmp_path) if "lost" in event["what"]}
        assert "nothing came from it" in lost[number]
        wake.set()
        _go_on(workers)
        assert stuck.job.rejoined
    finally:
        stop.set()
        wake.set()
        for worker in workers:
            worker.join(20)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_a_newcomer_may_take_its_time_before_its_first_batch(tmp_path: Path) -> None:
    """It is in the view, and does not say anything yet; the others' steps have taken much less than it takes."""
    stop = threading.Event()
    first = _Worker(tmp_path, 2, {}, stop)
    _until(lambda: first.job is not None, "the first comes in")
    workers = [first, _Worker(tmp_path, 2, {}, stop)]
    try:
        _go_on(workers, 40)
        _until(lambda: first.job.deadline_s == 1.0, "learned, and at its floor", 60)
        workers.append(_Worker(tmp_path, 2, {}, stop, begin_after_s=1.7))
        _until(lambda: workers[2].job is not None, "the third comes in")
        number = workers[2].job.worker
        _go_on(workers)
        assert workers[2].job.worker == number
        assert workers[2].job.rejoined == 0
    finally:
        stop.set()
        for worker in workers:
            worker.join(20)


def _until_killed(folder: str) -> None:
    """A worker to be killed."""
    _Worker(Path(folder), 3, {}, threading.Event()).join()


@pytest.mark.slow
@pytest.mark.processes
@pytest.mark.timeout(180)
@pytest.mark.parametrize("killed_first", [False, True], ids=["member", "coordinator"])
def test_who_is_busy_stays_through_a_view_change(killed_first: bool, tmp_path: Path) -> None:
    stop, busy, done = threading.Event(), threading.Event(), threading.Event()

    def evaluate(job: Any) -> None:
        with job.busy():
            busy.set()
            done.wait(60)

    coming = [
        lambda: _Worker(tmp_path, 3, {}, stop),
        lambda: _Worker(tmp_path, 3, {60: evaluate}, stop),
    ]
    meeting, victim = Meeting(tmp_path), None
    workers: list[_Worker] = []
    try:
        for come in [None, *coming] if killed_first else [*coming, None]:
            members = len(view.ids) if (view := meeting.newest()) else 0
            if come is None:
                victim = LocalJob(1, _until_killed, (str(tmp_path),))
            else:
                workers.append(come())
            _until(lambda members=members: len((meeting.newest() or _view(0)).ids) > members, "comes in", 120)  # type: ignore[misc]
        waiting = workers[0]
        _until(busy.is_set, "evaluates", 60)
        numbers, view = [worker.job.worker for worker in workers], waiting.job.view
        assert victim is not None
        victim.kill()
        _until(lambda: (meeting.newest() or _view(0)).number > view, "a new view", 20)
        time.sleep(2.5 * waiting.job.deadline_s)
        done.set()
        _go_on(workers)
        assert [worker.job.worker for worker in workers] == numbers
        assert [worker.job.rejoined for worker in workers] == [0, 0]
        assert sorted(waiting.job.members) == numbers
    finally:
        stop.set()
        done.set()
        if victim is not None:
            victim.kill()
        for worker in workers:
            worker.join(20)
