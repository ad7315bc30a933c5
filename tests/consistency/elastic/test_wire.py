"""How vectors are collected in an elastic group: by any codec, with feedback that a failed step leaves as it was."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency.elastic.coded import NAME, Coded
from laconic.consistency.elastic.meeting import read_events
from laconic.consistency.elastic.vectors import Collected, Exact, Occasion, Offer, Unreadable
from laconic.errors import BadInput, PayloadError
from tests.consistency.elastic.trainers import Trainer, assert_alike, come_and_go, until

NUMEL, CODED = 300, 256
CODECS = ["dynamic8", "topk(0.1)", "adacomp", "onebit", "bf16"]


def _agree(
    wires: list[Collected], counts: list[int], step: int, included: list[int], commit: bool = True
) -> list[Tensor]:
    """One step by hand; wire 0 is the coordinator's. Returns what each worker goes on with."""
    occasion = [Occasion(step, place, sum(counts)) for place in range(len(wires))]
    others = range(1, len(wires))
    sent = [wires[place].offer(counts[place], occasion[place]).clone() for place in others]
    bodies: list[Tensor | None] = [None, *sent]
    offers = [Offer(100 + place, counts[place], bodies[place]) for place in included]
    message, values = wires[0].combine(offers, occasion[0], len(wires) - 1)
    assert message is not None
    results = [values.clone(), *(wire.read(message.clone()).clone() for wire in wires[1:])]
    if commit:
        for place, wire in enumerate(wires):
            wire.committed(place in included)
    return results


def _residuals(wire: Any) -> tuple[Tensor, Tensor]:
    """This worker's residuals, of its own and of the mean."""
    return tuple(residuals.state_dict().get(NAME, torch.zeros(CODED)) for residuals in (wire._mine, wire._ours))  # type: ignore[return-value]


@pytest.mark.parametrize("spec", CODECS)
def test_nothing_is_lost_on_the_way_whatever_fails(spec: str) -> None:
    """All that was applied, and all residuals, is all that was offered; a failed step is as if it had not been."""
    counts, random = [3, 4, 4], np.random.default_rng(7)
    codec = laconic.codec(spec)
    wires: list[Collected] = [Coded(codec, CODED, NUMEL) for _ in counts]
    again: list[Collected] = [Coded(codec, CODED, NUMEL) for _ in counts]  # for which no step ever fails
    applied, offered = torch.zeros(NUMEL), torch.zeros(NUMEL)
    for step in range(12):
        for _ in range(int(random.integers(0, 3))):
            for wire in wires:
                wire.values[:] = torch.from_numpy(random.normal(size=NUMEL).astype(np.float32))
            _agree(wires, counts, step, [0, 1, 2], commit=False)
        vectors = [torch.from_numpy(random.normal(size=NUMEL).astype(np.float32)) for _ in counts]
        for wire, other, vector in zip(wires, again, vectors, strict=True):
            wire.values[:] = vector
            other.values[:] = vector
        results = _agree(wires, counts, step, [0, 1, 2])
        assert all(torch.equal(result, results[0]) for result in results), "workers go on with different bits"
        assert torch.equal(results[0], _agree(again, counts, step, [0, 1, 2])[0]), "a failed step left something behind"
        applied += results[0]
        offered += sum(count / 11 * vector for count, vector in zip(counts, vectors, strict=True))
    torch.testing.assert_close(applied[CODED:], offered[CODED:], rtol=1e-5, atol=1e-5)
    mine, ours = zip(*map(_residuals, wires), strict=True)
    if spec == "bf16":  # so fine that nothing is fed back
        assert not any(residual.any() for residual in (*mine, *ours))
        torch.testing.assert_close(applied, offered, rtol=0.02, atol=0.1)
    else:
        assert any(residual.any() for residual in mine[1:])
        assert ours[0].any()
        torch.testing.assert_close(applied[:CODED] + sum(mine) + sum(ours), offered[:CODED], rtol=1e-4, atol=1e-4)


def test_who_was_dropped_owes_what_it_residuals() -> None:
    codec = laconic.codec("topk(0.1)")
    wires: list[Any] = [Coded(codec, CODED, NUMEL) for _ in range(3)]
    for step, included in enumerate([[0, 1, 2], [0, 1]]):
        for wire in wires:
            wire.values[:] = torch.randn(NUMEL)
        before = [_residuals(wire)[0] for wire in wires]
        vectors = [wire.values.clone() for wire in wires]
        results = _agree(wires, [4, 4, 4], step, included)
    assert torch.equal(_residuals(wires[2])[0], before[2])
    assert not torch.equal(_residuals(wires[1])[0], before[1])
    torch.testing.assert_close(results[0][CODED:], ((vectors[0] + vectors[1]) / 2)[CODED:])


def test_a_state_from_a_peer_says_what_became_of_an_offer() -> None:
    codec = laconic.codec("topk(0.1)")
    for included, offered, expected in ((True, 5, "next"), (False, 5, "kept"), (True, 3, "nothing")):
        wire: Any = Coded(codec, CODED, NUMEL)
        for step in (0, offered):
            wire.values[:] = torch.randn(NUMEL)
            wire.offer(4, Occasion(step, 1, 8))
            if step == 0:
                wire.committed(True)
        kept, ahead = _residuals(wire)[0], copy.deepcopy(wire)
        ahead.committed(True)
        following = _residuals(ahead)[0]
        wire.resume(6, included)
        found = {"next": following, "kept": kept, "nothing": torch.zeros(CODED)}[expected]
        assert torch.equal(_residuals(wire)[0], found), expected


def test_one_alone_sends_nothing_and_uses_its_residuals() -> None:
    wires: list[Any] = [Coded(laconic.codec("onebit"), CODED, NUMEL) for _ in range(2)]
    for wire in wires:
        wire.values[:] = torch.randn(NUMEL)
    _agree(wires, [4, 4], 0, [0, 1])
    mine, ours = _residuals(wires[0])
    for step in (1, 2):
        own = wires[0].values[:] = torch.randn(NUMEL)
        message, values = wires[0].combine([Offer(100, 8, None)], Occasion(step, 0, 8), 0)
        assert message is None
        expected = own.clone()
        if step == 1:
            expected[:CODED] += mine
            expected[:CODED] += ours
        assert torch.equal(values, expected)
        wires[0].committed(True)


def test_what_cannot_be_read_names_the_worker_and_what_is_not_finite_is_nan_for_all() -> None:
    coded: list[Collected] = [Coded(laconic.codec("dynamic8"), CODED, NUMEL) for _ in range(2)]
    exact: list[Collected] = [Exact(NUMEL) for _ in range(2)]
    for wires in (coded, exact):
        for wire in wires:
            wire.values[:] = 1.0
        body = wires[1].offer(4, Occasion(0, 1, 8)).clone()
        bad = [body[:-1], body[:7]]
        if wires is coded:
            bad.append(body.clone())
            bad[-1][-3] ^= 16  # one bit on its way
        for each in bad:
            with pytest.raises(Unreadable, match="what worker 7 sent"):
                wires[0].combine([Offer(3, 4, None), Offer(7, 4, each)], Occasion(0, 0, 8), 1)
            with pytest.raises(PayloadError):
                wires[1].read(each)
        for wire in wires:
            wire.values[:] = 1.0
        wires[1].values[3] = float("nan")
        for result in _agree(wires, [4, 4], 0, [0, 1]):
            assert result[3].isnan()
    for wire in coded:
        wire.values[:] = 1.0
    for result in _agree(coded, [4, 4], 1, [0, 1]):
        assert result.isfinite().all(), "what was not finite stays in the residual"


@pytest.mark.parametrize("spec", [pytest.param("none", marks=pytest.mark.slow), "dynamic8"])
def test_workers_that_come_and_go_hold_the_same_bits(spec: str, tmp_path: Path) -> None:
    workers = come_and_go(tmp_path, codec=spec)
    for worker in workers[1:]:
        assert max(worker.digests) == 96
        assert worker.loss < 0.25, "it does not learn"
    assert_alike([workers[1], workers[0], *workers[2:]])
    assert len(workers[3].digests) < 96, "the last came later"


def test_who_sends_the_coordinator_what_cannot_be_read_is_out_and_comes_back(tmp_path: Path) -> None:
    def tamper(job: Any) -> None:
        offer, calls = job._wire.offer, []

        def flip(*about: Any) -> Tensor:
            message = offer(*about)
            calls.append(1)
            if len(calls) >= 5 and job.worker == 3:
                message[-3] ^= 4
            return message

        job._wire.offer = flip

    options: dict[str, Any] = {"workers": 3, "codec": "dynamic8", "drop_slowest": 1}
    workers = [Trainer(tmp_path, **options)]
    until(lambda: (tmp_path / "view-00000001.json").exists())
    workers.append(Trainer(tmp_path, spoil=lambda gradient: time.sleep(0.01), **options))  # is not waited for
    until(lambda: (tmp_path / "view-00000002.json").exists())
    workers.append(Trainer(tmp_path, prepare=tamper, **options))
    for worker in workers:
        worker.ended()
    assert_alike(workers)
    happened = [event["what"] for event in read_events(tmp_path)]
    assert any("what worker 3 sent cannot be read: " in what for what in happened)
    assert "rejoined: had been worker 3" in happened


def test_who_has_no_samples_in_a_step_is_not_in_it(tmp_path: Path) -> None:
    """A rule ignores what it sends, which therefore does not count as sent."""
    seen: list[tuple[int, bool]] = []

    def watch(job: Any) -> None:
        committed = job._wire.committed

        def noted(included: bool) -> None:
            seen.append((job._work.samples, included))
            committed(included)

        job._wire.committed = noted

    options: dict[str, Any] = {"codec": "topk(0.1)", "consistency": "robust(median)", "workers": 3}
    few = {"data": laconic.Samples(3, 2, epochs=2)}  # steps of one sample and of two
    workers = [Trainer(tmp_path, prepare=watch, **options, **few) for _ in range(3)]
    for worker in workers:
        worker.ended()
    assert {samples for samples, _ in seen} == {0, 1}
    assert all(included == (samples > 0) for samples, included in seen)


def test_codecs_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    model = nn.Linear(40, 40)
    make = {"data": laconic.Samples(8, 4), "meeting": tmp_path / "a", "patience_s": 0.5}
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for spec, sentence in (("auto", "name a codec"), ("powersgd(2)", "matrices"), ("dynamic9", "unknown codec")):
        with pytest.raises(BadInput, match=sentence):
            laconic.elastic(model, optimizer, codec=spec, **make)
    with (
        laconic.elastic(model, optimizer, codec="dynamic8", **make),
        pytest.raises(BadInput, match=r"trains .*, through dynamic8; this worker has .* of 4 by seed 0; another train"),
    ):
        laconic.elastic(model, optimizer, codec="none", **make)


def test_a_worker_with_another_model_of_the_same_size_is_refused(tmp_path: Path) -> None:
    make = {"data": laconic.Samples(8, 4), "meeting": tmp_path, "patience_s": 0.5}
    first, others = nn.Linear(40, 40), (nn.Sequential(nn.Linear(40, 40)), nn.Linear(41, 40, bias=False))
    with laconic.elastic(first, torch.optim.SGD(first.parameters(), 0.1), **make):
        for model in others:
            with pytest.raises(BadInput, match=r"trains 1640 parameters \(\w+\) by SGD.*; this worker has 1640 param"):
                laconic.elastic(model, torch.optim.SGD(model.parameters(), 0.1), **make)
