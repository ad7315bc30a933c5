"""How members of a view sum their vectors among themselves, whatever fails and whoever comes and goes."""

from __future__ import annotations

import contextlib
import copy
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import laconic
from laconic.consistency.elastic.exchanged import Exchanged
from laconic.consistency.elastic.line import Line
from laconic.consistency.elastic.meeting import Meeting, View, read_events
from laconic.consistency.elastic.messages import MemberKind, MemberMessage, pack
from laconic.consistency.elastic.progress import ExchangeProgress
from laconic.consistency.elastic.vectors import Occasion
from laconic.errors import BadInput
from laconic.transports.base import Transport
from laconic.transports.frame import Frame
from laconic.transports.threads import run_threads
from tests.consistency.elastic.trainers import Trainer, assert_alike, until

NUMEL, CODED = 300, 256
pytestmark = pytest.mark.usefixtures("one_thread")


def _share(wires: Sequence[Exchanged], counts: Sequence[int], step: int) -> list[Tensor]:
    """One exchange in a view of its own; returns what each would go on with."""
    hosts = (0,) * len(wires)

    def work(transport: Transport) -> Tensor:
        wire = wires[transport.rank]
        occasion = Occasion(step, transport.rank, sum(counts))
        return wire.share(counts[transport.rank], occasion, transport, hosts).clone()

    return run_threads(len(wires), work)


def _left(wire: Exchanged) -> Tensor:
    return wire.state_dict().get("own", torch.zeros(CODED))


@pytest.mark.parametrize(
    ("spec", "algorithm"),
    [("dynamic8", "auto"), ("dynamic8", "ring"), ("topk(0.1)", "auto"), ("topk(0.1)", "direct"), ("onebit", "auto")],
)
def test_nothing_is_lost_through_failed_steps_and_new_views(spec: str, algorithm: str) -> None:
    """All that was applied, and all residuals, is all that was offered by those who are still there."""
    random = np.random.default_rng(3)
    wires = [Exchanged(laconic.codec(spec), CODED, NUMEL, algorithm) for _ in range(4)]
    applied, offered = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(10):
        members = wires[: 1 + int(random.integers(0, 4))]
        counts = [3, 4, 0, 5][: len(members)]
        for commits in (False, True):
            vectors = [torch.from_numpy(random.normal(size=NUMEL).astype(np.float32)) for _ in members]
            for wire, vector in zip(members, vectors, strict=True):
                wire.values.copy_(vector)
            results = _share(members, counts, step)
            assert all(torch.equal(result, results[0]) for result in results), "members go on with different bits"
            for wire in members:
                if commits:
                    wire.committed(True)
                else:
                    wire.renew()
        applied += results[0]
        offered += sum(count / sum(counts) * vector for count, vector in zip(counts, vectors, strict=True))
    torch.testing.assert_close(applied[CODED:], offered[CODED:], rtol=1e-5, atol=1e-5)
    left = [_left(wire) for wire in wires]
    assert any(residual.any() for residual in left)
    torch.testing.assert_close(applied[:CODED] + sum(left), offered[:CODED], rtol=1e-4, atol=1e-4)


def test_a_failed_step_leaves_residuals_as_they_were() -> None:
    wires = [Exchanged(laconic.codec("topk(0.1)"), CODED, NUMEL) for _ in range(3)]
    for step in range(2):
        for wire in wires:
            wire.values.copy_(torch.randn(NUMEL))
        before = [_left(wire) for wire in wires]
        _share(wires, [4, 4, 4], step)
        if step == 0:
            for wire in wires:
                wire.committed(True)
    assert all(torch.equal(_left(wire), kept) for wire, kept in zip(wires, before, strict=True))
    assert before[0].any()


@pytest.mark.parametrize(("included", "offered", "kept"), [(True, 5, True), (False, 5, False), (True, 3, False)])
def test_a_state_from_a_peer_says_what_became_of_an_offer(included: bool, offered: int, kept: bool) -> None:
    wires = [Exchanged(laconic.codec("topk(0.1)"), CODED, NUMEL) for _ in range(2)]
    for wire in wires:
        wire.values.copy_(torch.randn(NUMEL))
    _share(wires, [4, 4], offered)
    wire = wires[0]
    ahead = copy.deepcopy(wire._residuals)
    ahead.commit()
    wire.resume(6, included)
    assert torch.equal(_left(wire), ahead.state_dict()["vector"] if kept else torch.zeros(CODED))
    assert _left(wire).any() == kept


def test_one_alone_uses_its_residuals_and_loses_none_when_it_fails() -> None:
    wires = [Exchanged(laconic.codec("onebit"), CODED, NUMEL) for _ in range(2)]
    for wire in wires:
        wire.values.copy_(torch.randn(NUMEL))
    _share(wires, [4, 4], 0)
    wires[0].committed(True)
    left, own = _left(wires[0]), torch.randn(NUMEL)
    for _ in range(2):  # the first fails
        wires[0].values.copy_(own)
        [result] = _share(wires[:1], [8], 1)
    assert torch.equal(result[:CODED], own[:CODED] + left)
    assert torch.equal(result[CODED:], own[CODED:])
    wires[0].committed(True)
    assert not _left(wires[0]).any()


def test_a_state_of_either_form_is_taken_over() -> None:
    wire = Exchanged(laconic.codec("topk(0.1)"), CODED, NUMEL)
    wire.load_state_dict({"own": torch.ones(CODED), "mean": torch.ones(CODED)})
    assert torch.equal(_left(wire), torch.full((CODED,), 2.0))
    with pytest.raises(BadInput, match="residuals"):
        wire.load_state_dict({"own": torch.ones(CODED + 1)})


def test_pieces_of_other_views_are_dropped(tmp_path: Path) -> None:
    with (
        contextlib.closing(Line(Meeting(tmp_path), 1, 5.0)) as line,
        contextlib.closing(Line(Meeting(tmp_path), 2, 5.0)) as other,
    ):
        view = View(7, ((1, line.address), (2, other.address)), "", 0.0)
        for each in (line, other):
            each.turn_to(view)
        until(lambda: line.next(0.01) is None and other.next(0.01) is None and other.has_reached(1))
        data = torch.arange(3.0)
        for number in (6, 7, 7 + 128):
            other.tell(1, pack(MemberKind.PIECE, number, 0, number, body=data))
        until(lambda: line.next(0.01) is not None or line.progress.pieces)
        until(lambda: line.next(0.01) is None and line.ignored == 2)
        ((code, came),) = line.progress.pieces[2]
        assert code == 7
        assert torch.equal(came, data)


def test_who_cannot_reach_whom_is_known_as_long_as_it_is_so(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = ExchangeProgress(View(1, ((3, ""), (5, ""), (9, "")), "", 0.0))

    def says(sender: int, missed: int, kind: MemberKind = MemberKind.WAITING) -> None:
        progress.note(MemberMessage(sender, kind, 1, 0, missed, 0, torch.empty(0)))

    says(5, 0b100)
    now[0] += 1.0
    says(5, 0b100)
    assert progress.apart(1.5) == []
    now[0] += 1.0
    assert [(loss.peer, loss.by) for loss in progress.apart(1.5)] == [(9, 5)]
    assert progress.said_since(5, 0.0) == 101.0
    says(5, 0)
    assert progress.apart(0.5) == []
    says(9, 0b10)
    says(9, 0, MemberKind.READY)
    now[0] += 9.0
    assert progress.apart(0.5) == []


def _after(job: Any, calls: int, act: Callable[[], Any]) -> None:
    """Do something in the middle of an exchange: when this member sends its pieces for so many-th time."""
    transport, seen = job._group.line.transport, []
    send_to = transport.send_to

    def send(peer: int, frame: Frame) -> Any:
        if frame.kind is MemberKind.PIECE:
            seen.append(1)
            if len(seen) == calls:
                changed = act()
                frame = frame if changed is None else frame._replace(payload=changed(frame.payload))
        return send_to(peer, frame)

    transport.send_to = send


@pytest.mark.parametrize("spec", ["none", "dynamic8"])
def test_who_sends_what_cannot_be_read_is_out_and_comes_back(spec: str, tmp_path: Path) -> None:
    def flipped(payload: Tensor) -> Tensor:
        payload = payload.clone()
        payload[-20] ^= 4
        return payload

    first = Trainer(tmp_path, workers=3, codec=spec)
    until(lambda: (tmp_path / "view-00000001.json").exists())
    others = [Trainer(tmp_path, workers=3, codec=spec)]
    until(lambda: (tmp_path / "view-00000002.json").exists())
    others.append(Trainer(tmp_path, workers=3, codec=spec, prepare=lambda job: _after(job, 9, lambda: flipped)))
    for worker in (first, *others):
        worker.ended()
    assert_alike([first, *others])
    happened = [event["what"] for event in read_events(tmp_path)]
    assert any("what worker 3 sent cannot be read: " in what for what in happened)
    assert "rejoined: had been worker 3" in happened


def test_who_is_silent_in_the_middle_of_an_exchange_costs_the_others_one_deadline(tmp_path: Path) -> None:
    """Its process hangs while its connections stand: nobody applies half a step, and all end alike."""
    first = Trainer(tmp_path, workers=3, codec="dynamic8")
    until(lambda: (tmp_path / "view-00000001.json").exists())
    woken = threading.Event()

    def hang() -> None:
        woken.wait(60)

    hangs = Trainer(tmp_path, workers=3, codec="dynamic8", prepare=lambda job: _after(job, 62, hang))
    other = Trainer(tmp_path, workers=3, codec="dynamic8")
    until(lambda: any("nothing came from it" in event["what"] for event in read_events(tmp_path)) or first.error)
    calls = first.calls
    until(lambda: first.calls > calls + 3 or first.error)
    woken.set()
    for worker in (first, other, hangs):
        worker.ended()
    assert_alike([first, other, hangs])
    lost = [event["rank"] for event in read_events(tmp_path) if "nothing came from it" in event["what"]]
    assert len(lost) == 1, "only who hangs is blamed"


def test_two_members_that_cannot_reach_each_other_do_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the two the later one leaves, and stays away as long as it is so."""
    cut, reaches = threading.Event(), Line.reaches
    apart = {2, 3}

    def reach(line: Line, member: int) -> bool:
        return reaches(line, member) and not (cut.is_set() and {line.id, member} == apart)

    monkeypatch.setattr(Line, "reaches", reach)
    options: dict[str, Any] = {"workers": 3, "codec": "dynamic8", "silence_s": 0.5}

    def stop(job: Any) -> None:
        cut.set()
        job._group.line.transport.send_to = lambda peer, frame, send=job._group.line.transport.send_to: (
            send(1, pack(MemberKind.BUSY, 0, 0))
            if frame.kind is MemberKind.PIECE and peer in apart
            else send(peer, frame)
        )

    workers = []
    for number in (1, 2, 3):
        workers.append(Trainer(tmp_path, prepare=stop if number == 3 else None, **options))
        until(lambda number=number: (tmp_path / f"id-{number:08d}").exists())  # type: ignore[misc]
    for worker in workers:
        worker.ended()
    assert_alike(workers)
    happened = [event["what"] for event in read_events(tmp_path)]
    assert any("and it cannot reach each other" in what for what in happened)
