"""A newcomer loads the state in chunks while the others train on."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.consistency.elastic import handover
from laconic.consistency.elastic.handover import Handover, Loader, _catalogue
from laconic.consistency.elastic.line import Line
from laconic.consistency.elastic.meeting import Meeting, View
from laconic.consistency.elastic.membership import Membership
from laconic.consistency.elastic.messages import (
    NO_MODEL,
    AgreementNote,
    MemberKind,
    MemberMessage,
    StateOffer,
    pack,
    unpack,
)
from laconic.consistency.elastic.replica import Replica
from laconic.errors import PayloadError
from laconic.transports.frame import NOTHING, Frame
from laconic.workloads.order import SampleLedger
from tests.consistency.elastic.trainers import Trainer, assert_alike, until


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch, one_thread: None) -> None:
    """Chunks of 4 KiB, so that a small model has many."""
    monkeypatch.setattr(handover, "CHUNK_NBYTES", 4096)
    monkeypatch.setattr(handover, "SMALL_NBYTES", 0)
    monkeypatch.setattr(handover, "ASK_S", 0.01)


def _joined(folder: Path, **options: Any) -> tuple[list[Trainer], list[tuple[int, int]]]:
    """Two workers, and one that comes later; its steps and bytes when it asked to join."""
    loaded: list[tuple[int, int]] = []
    real = Membership.begin

    def begin(self: Membership, patience_s: float | None = None) -> None:
        real(self, patience_s)
        loaded.append((self.watch.standing.step, self.watch.id))

    options = {"spoil": lambda gradient: time.sleep(0.005), **options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Membership, "begin", begin)
        workers = [Trainer(folder, workers=2, **options) for _ in range(2)]
        until(lambda: workers[0].calls > 8 or workers[0].error)
        workers.append(Trainer(folder, **options))
        for worker in workers:
            worker.ended()
    return workers, loaded


@pytest.mark.parametrize(
    "options",
    [{}, {"codec": "dynamic8"}, {"consistency": "local(4)"}, {"consistency": "diloco(4)"}, {"drop_slowest": 1},
     {"consistency": "diloco(2)", "codec": "dynamic8"}],
    ids=str,
)  # fmt: skip
def test_a_newcomer_has_caught_up_when_it_joins_and_no_step_is_lost(tmp_path: Path, options: dict[str, Any]) -> None:
    workers, begun = _joined(tmp_path, data=laconic.Samples(256, 32, 12), **options)
    steps = {worker: step for step, worker in begun}
    assert steps[3] > 0, "it joined without the state"
    assert_alike(workers[:2])
    assert_alike([workers[0], workers[2]])
    joined = [event for event in Meeting(tmp_path).events() if event["what"] == "joined" and event["rank"] == 3]
    assert len(joined) == 1


@pytest.mark.parametrize("consistency", ["local(3)", "diloco(3)"])
def test_a_newcomer_repeats_the_blocks_of_a_lone_member_to_the_bit(
    consistency: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else it drops what it has loaded again and again, as from another branch."""
    same: list[bool] = []
    choose = Loader._choose

    def compare(self: Loader, offer: MemberMessage) -> None:
        said, own = offer.read(StateOffer), self._digests
        if said.digest is not None and said.at in own:
            same.append(said.digest == own[said.at])
        choose(self, offer)

    monkeypatch.setattr(Loader, "_choose", compare)
    monkeypatch.setattr(handover, "CHUNK_NBYTES", 512)  # it has to repeat several blocks
    options = {"data": laconic.Samples(256, 32, 100_000), "codec": "dynamic8", "consistency": consistency}
    workers = [Trainer(tmp_path, **options)]
    until(lambda: workers[0].calls > 20 or workers[0].error)
    workers.append(Trainer(tmp_path, **options))
    until(lambda: workers[1].calls > 10 or workers[1].error)
    for worker in workers:
        worker.leave_after = worker.calls + 20
        worker.ended()
    assert len(same) > 1
    assert all(same)
    assert_alike(workers)


def test_a_newcomer_that_asks_again_is_in_the_view_once(tmp_path: Path) -> None:
    with (
        contextlib.closing(Line(Meeting(tmp_path), 1, 5.0)) as old,
        contextlib.closing(Line(Meeting(tmp_path), 2, 5.0)) as new,
    ):
        old.view = View(1, ((1, old.address),), "job", 0.0)
        until(lambda: new.invitation(0.0) or old.next(0.0) or new.ask(old.view))
        until(lambda: old.next(0.01) or 2 in old.newcomers)
        view = old.propose({}, 0, 0, {2})
        old.turn_to(view)
        new.tell(1, pack(MemberKind.JOIN, 1, 7, text=new.address))
        new.tell(1, pack(MemberKind.REPORT, 2, 7))
        until(lambda: old.next(0.01))
        assert view.ids == (1, 2)
        assert not old.newcomers


class _Chunks:
    """Two members in this process, and what passes between them and a newcomer; `deaf` ones do not answer."""

    def __init__(self, blobs: dict[int, Handover], step: int) -> None:
        self.members, self.step, self.deaf, self.served = blobs, step, set[int](), Counter[int]()
        self.connections = 1
        self.handed: deque[MemberMessage] = deque()

    def has_reached(self, member: int) -> bool:
        return member not in self.deaf

    def tell(self, member: int, frame: Frame) -> None:
        if member in self.deaf:
            return
        lines = self.members[member]._line
        lines.wishes.append(unpack(9, frame))  # type: ignore[union-attr]
        self.members[member].answer(self.step, begun=True)
        while lines.said:  # type: ignore[attr-defined]
            answer = unpack(member, lines.said.popleft())  # type: ignore[attr-defined]
            self.served[member] += answer.kind is MemberKind.CHUNK and answer.body.numel() > 0
            self.handed.append(answer)


class _Said:
    def __init__(self) -> None:
        self.wishes, self.said = deque[MemberMessage](), deque[Frame]()

    def tell(self, member: int, frame: Frame) -> None:
        self.said.append(frame)


def _replica(seed: int, own: float) -> Replica:
    """Weights by the seed, and a buffer of the member's own."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    model[1].running_mean.fill_(own)
    return Replica(model, torch.optim.SGD(model.parameters(), 0.1), SampleLedger(64, 8, 0))


def test_chunks_come_from_all_members_and_loading_goes_on_after_one_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "WINDOW", 1)
    members = {}
    for number in (1, 2):
        members[number] = Handover(_Said(), _replica(0, own=number))  # type: ignore[arg-type]
        members[number].keep_at(5)
        members[number].applied(5)
    network, mine = _Chunks(members, step=5), _replica(1, own=0)
    loader = Loader(network, mine, lambda block, step: mine.load(block), lambda *_: None)  # type: ignore[arg-type]
    view = View(1, ((1, ""), (2, "")), "job", 0.0)
    for _ in range(3):
        loader.go_on(view)
    before = loader.received_nbytes
    assert set(network.served) == {1, 2}
    assert 0 < before < members[1].held_nbytes
    network.deaf.add(2)
    until(lambda: loader.go_on(view) or loader.is_ready, 10)
    assert loader.step == 5
    assert loader.received_nbytes == members[1].held_nbytes, "a chunk came twice"
    assert torch.equal(mine.weights.values, members[1]._replica.weights.values)
    assert float(mine.model[1].running_mean[0]) == 1.0, "what differs comes from the coordinator"


def _size_after(rounds: int, step_s: float, chunk_s: float) -> int:
    """A window after so many rounds, where a member answers every `step_s`, and a chunk takes `chunk_s`."""
    window, now = handover.PullWindow(), 0.0
    for number in range(rounds):
        now = max(now, number * step_s)
        for _ in range(window.size):
            now += chunk_s
            window.came(now)
    return window.size


@pytest.mark.parametrize(
    ("step_s", "chunk_s", "size"),
    [
        (0.5, 0.0205, 16),  # 256 KiB at 100 Mbit/s: 16 chunks take 0.33 s of the step, 32 would not fit
        (0.5, 0.0, 64),
        (0.05, 0.0205, 4),
        (10.0, 0.205, 8),  # 16 take longer than a quarter of ANSWER_S, and might be asked for twice
    ],
)
def test_a_window_grows_while_its_answers_leave_the_link_idle(step_s: float, chunk_s: float, size: int) -> None:
    assert _size_after(1, step_s, chunk_s) == 4
    assert _size_after(20, step_s, chunk_s) == size


def test_a_window_shrinks_when_its_answers_fill_the_link() -> None:
    window, now = handover.PullWindow(), 0.0
    window.size = 32
    for _ in range(4 * 32):
        now += 0.02
        window.came(now)
    assert window.size == 4


def test_a_wait_with_nothing_to_ask_is_not_the_links() -> None:
    window = handover.PullWindow()
    for at in range(4):
        window.came(0.1 * at)
    window.pause()
    for at in range(4):
        window.came(100 + 0.1 * at)
    assert window.size == 4


def test_a_newcomer_gives_up_what_it_loaded_on_another_branch() -> None:
    member, mine = Handover(_Said(), _replica(0, own=1)), _replica(1, own=0)  # type: ignore[arg-type]
    member.keep_at(5)
    member.applied(5)
    network = _Chunks({1: member}, step=5)
    loader = Loader(network, mine, lambda block, step: mine.load(block), lambda *_: None)  # type: ignore[arg-type]
    until(lambda: loader.go_on(View(1, ((1, ""),), "job", 0.0)) or loader.is_ready, 10)
    other = Handover(_Said(), _replica(2, own=1))  # type: ignore[arg-type]
    other.keep_at(5)
    other.applied(5)
    network.members = {2: other}
    after = View(2, ((2, ""),), "job", 0.0)
    loader.go_on(after)
    assert not loader.is_ready
    until(lambda: loader.go_on(after) or loader.is_ready, 10)
    assert torch.equal(mine.weights.values, other._replica.weights.values)


def test_memory_for_newcomers_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(handover, "LOGGED_NBYTES", 0)
    member = Handover(_Said(), _replica(0, own=1))  # type: ignore[arg-type]
    most, mean = 0, torch.ones(64 * 64)
    for step in range(200):
        member._line.wishes.append(unpack(9, pack(MemberKind.WANT, 1, NO_MODEL)))
        member.answer(step, begun=True)
        if member.is_wanted:
            member.keep_at(step + 1)
        member.agreed(step, mean, {})
        member.applied(step + 1)
        most = max(most, member.held_nbytes)
    assert 0 < most < 4 * mean.nbytes
    monkeypatch.setattr(handover, "IDLE_S", 0.0)
    member.agreed(200, mean, {})
    assert member.held_nbytes == 0


@pytest.mark.parametrize(
    ("text", "body"),
    [
        ("{", b""), ("[]", b""), ('{"at": 1, "digest": null}', b""), ('{"at": "x", "digest": null, "blobs": []}', b""),
        ('{"at": 1, "digest": null, "blobs": [[0, 99, null]]}', b""),
        ('{"at": 1, "digest": null, "blobs": [[0, 99, null]]}', b"123"),
        ('{"at": 1, "digest": null, "blobs": [[0, -9999999, null]]}', b""),
        ('{"at": 1, "digest": null, "blobs": [[0, 99, {"parts": 2}]]}', b"1234"),
    ],
)  # fmt: skip
def test_a_forged_offer_is_one_error(text: str, body: bytes) -> None:
    content = torch.frombuffer(bytearray(body), dtype=torch.uint8) if body else NOTHING
    with pytest.raises(PayloadError, match=r"OFFERED from worker 3|JSON"):
        _catalogue(unpack(3, pack(MemberKind.OFFERED, 0, 1, text=text, body=content)))


@pytest.mark.parametrize("text", ["x", '{"parts": 1}', '{"parts": "a", "included": [], "ids": [], "paces": []}'])
def test_a_forged_agreement_is_one_error(text: str) -> None:
    with pytest.raises(PayloadError):
        unpack(3, pack(MemberKind.REPEAT, 0, 1, text=text)).read(AgreementNote)
