"""Elastic training that agrees on weights after blocks of steps, or by a robust rule, through joins and losses."""

from __future__ import annotations

import copy
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency.elastic.door import way_for
from laconic.consistency.elastic.fragment_work import FragmentWork
from laconic.consistency.elastic.meeting import read_events
from laconic.consistency.elastic.replica import BlockWork, Replica, digest
from laconic.consistency.fragments import fragments_of
from laconic.consistency.modes.diloco import Diloco
from laconic.consistency.modes.local import LocalMode
from laconic.errors import BadInput
from laconic.workloads.order import SampleLedger
from tests.consistency.elastic.trainers import (
    BATCH,
    EPOCHS,
    SAMPLES,
    Trainer,
    assert_alike,
    come_and_go,
    problem,
    until,
)

pytestmark = pytest.mark.usefixtures("one_thread")


def _data(epochs: int) -> dict[str, Any]:
    return {"data": laconic.Samples(SAMPLES, BATCH, epochs)}


@pytest.mark.parametrize(
    "options",
    [
        {"consistency": "local(5)"},
        {"consistency": "local(3)", "codec": "dynamic8"},
        {"consistency": "block_momentum(4, momentum=0.3)"},
        {"consistency": "diloco(4, momentum=0.3)", "codec": "dynamic8"},
        {"consistency": "sparseloco(4)", "codec": "topk(0.2)+int2"},
        {"consistency": "robust(median)"},
    ],
    ids=lambda options: " ".join(options.values()),
)
def test_workers_that_come_and_go_hold_the_same_bits(options: dict[str, Any], tmp_path: Path) -> None:
    workers = come_and_go(tmp_path, leave_after=31, **options)
    for worker in workers[1:]:
        assert max(worker.digests) == EPOCHS * SAMPLES // BATCH
        assert worker.loss < 0.35, "it does not learn"
    assert_alike([workers[1], workers[0], *workers[2:]])
    assert {event["rank"] for event in read_events(tmp_path)} > {1}


def _by_hand(way: str, parts: int) -> Tensor:
    """The weights after the training, computed slowly: every worker's model, one after the other, block for block."""
    mode: Any = way_for(way)
    workers = [problem() for _ in range(parts)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model, _, _ in workers]
    flat = lambda model: torch.cat([p.detach().reshape(-1) for p in model.parameters()])  # noqa: E731
    ledger, start = SampleLedger(SAMPLES, BATCH), flat(workers[0][0])
    update = torch.zeros_like(start)
    while ledger.epoch < EPOCHS:
        block = ledger.block(parts, mode.period)
        mean, total = torch.zeros_like(start), sum(len(share) for shares in block for share in shares)
        for place, ((model, x, y), optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            nn.utils.vector_to_parameters(start.clone(), model.parameters())
            for shares in block:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[shares[place]]), y[shares[place]]).backward()
                optimizer.step()
            if mode.state == "forget":
                optimizer.state.clear()
            mean += sum(len(shares[place]) for shares in block) / total * flat(model)
        if way.startswith("block"):
            update = (1 - 1 / parts) * update + mode.learning_rate * (mean - start)
            start = start + update
        elif way.startswith("diloco"):
            update = mode.momentum * update + (start - mean)
            start = start - mode.learning_rate * (start - mean + mode.momentum * update)
        else:
            start = mean
        ledger.commit(parts, range(parts), mode.period)
    return start


@pytest.mark.parametrize("way", ["local(3)", "block_momentum(8, learning_rate=0.5)", "diloco(8, momentum=0.6)"])
def test_blocks_are_what_their_formula_says(way: str, tmp_path: Path) -> None:
    workers = [Trainer(tmp_path, workers=3, consistency=way) for _ in range(3)]
    for worker in workers:
        worker.ended()
    expected = _by_hand(way, 3)
    for worker in workers:
        torch.testing.assert_close(worker.weights, expected, rtol=1e-4, atol=1e-5)


def _two_blocks(in_vain: int) -> tuple[Any, ...]:
    """Where two blocks of two steps end; `in_vain` steps of the second are made, and given up, before it is made."""
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.5)
    replica = Replica(model, optimizer, SampleLedger(50, 10), scheduler)
    blocks = BlockWork(replica, LocalMode(2), relative=False)

    def make(steps: int) -> list[int]:
        made = []
        for _ in range(steps):
            batch = blocks.share(2, 0)
            made += batch.tolist()
            model(torch.stack([batch.float()] * 4, 1) / 40).square().mean().backward()
            blocks.step()
        return made

    for block in range(2):
        if block == 1 and in_vain:
            before = digest(replica.weights.values)
            make(in_vain)
            assert digest(replica.weights.values) != before
            assert digest(blocks.committed) == before
            blocks.abandon()
            assert digest(replica.weights.values) == before
        samples = make(2)
        result = torch.empty(replica.numel)
        blocks.write(result)
        blocks.apply(result, 2, (0, 1))
    moments = [float(held["exp_avg_sq"].sum()) for held in optimizer.state.values()]
    checksum, rate = digest(replica.weights.values), optimizer.param_groups[0]["lr"]
    return samples, checksum, rate, moments, replica.ledger.state(), replica.extra


def test_a_block_that_is_given_up_leaves_everything_as_it_was() -> None:
    expected = _two_blocks(0)
    assert expected[2] == 0.05, "the learning rate after four steps"
    for in_vain in (1, 2):
        assert _two_blocks(in_vain) == expected


@pytest.mark.timeout(60)
def test_a_group_that_has_begun_does_not_wait_again_for_workers(tmp_path: Path) -> None:
    """One of three leaves in the first block, before anything is committed."""
    workers = [Trainer(tmp_path, leave_after, workers=3, consistency="local(8)") for leave_after in (None, None, 2)]
    for worker in workers:
        worker.ended()
    assert [max(worker.digests, default=0) for worker in workers] == [96, 96, 0]
    assert next(event["lost"] for event in read_events(tmp_path) if event["what"] == "left") == 8, "a block at most"


def test_a_block_that_was_made_without_a_worker_is_not_in_its_records(tmp_path: Path) -> None:
    offered = threading.Event()
    options: dict[str, Any] = {"workers": 2, "consistency": "local(4)", "drop_slowest": 1, **_data(3)}

    def let_it_come(_: Tensor) -> None:
        if first.calls == 13:
            offered.wait(60)

    def fall_behind(job: Any) -> None:
        group, agree, missed = job._group, job._group.agree, job._group.missed

        def late() -> Any:
            mean = missed()
            standing = group.standing
            while mean is None and standing.step == 0 and standing.at_stake:  # in its first block, until that is made
                time.sleep(0.005)
                mean = missed()
            return mean

        group.missed = late
        group.agree = lambda *about: (offered.set(), agree(*about))[1]

    first = Trainer(tmp_path, spoil=let_it_come, **options)
    until(lambda: (tmp_path / "view-00000001.json").exists())
    second = Trainer(tmp_path, prepare=fall_behind, **options)
    for worker in (first, second):
        worker.ended()
    assert second.recorded, "it was in a block in the end"
    assert 0 not in second.recorded


def test_a_coordinator_that_is_back_at_once_may_go_on_with_its_block(tmp_path: Path) -> None:
    """Its connection is gone for a moment, in the middle of a block, in which it says nothing."""
    looked = threading.Event()

    def miss(job: Any) -> None:
        group, missed = job._group, job._group.missed
        deadline, line = group.deadline, group.line

        def cut_once() -> Any:
            if group.standing.at_stake != 2 or looked.is_set():
                return missed()
            answers, reaches, held = [False], line.reaches, deadline.seconds
            line.reaches = lambda member: answers.pop() if answers else reaches(member)
            deadline.seconds = deadline.patience_s = 0.1
            try:
                return missed()
            finally:
                line.reaches, deadline.seconds, deadline.patience_s = reaches, held, held
                looked.set()

        group.missed = cut_once

    options: dict[str, Any] = {"workers": 2, "consistency": "local(4)", **_data(1)}
    first = Trainer(tmp_path, spoil=lambda _: looked.wait(60), **options)
    until(lambda: (tmp_path / "view-00000001.json").exists())
    second = Trainer(tmp_path, prepare=miss, **options)
    for worker in (first, second):
        worker.ended()
    assert looked.is_set()
    assert not [event for event in read_events(tmp_path) if "lost" in event["what"]]


def test_a_liar_is_outvoted(tmp_path: Path) -> None:
    honest = [Trainer(tmp_path, workers=3, consistency="robust(median, f=1)")]
    until(lambda: (tmp_path / "view-00000001.json").exists())
    honest.append(Trainer(tmp_path, workers=3, consistency="robust(median, f=1)"))
    liar = Trainer(tmp_path, workers=3, consistency="robust(median, f=1)", spoil=lambda gradient: gradient.mul_(-1e9))
    for worker in (*honest, liar):
        worker.ended()
        assert worker.loss < 1.0, "the median of two gradients and a lie learns, slower; the mean would be far off"


def test_ways_that_there_are_not_get_one_sentence(tmp_path: Path) -> None:
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for way, sentence in (
        ("async", r"sync, robust, local, block_momentum or diloco, not by 'async'.*use laconic.distribute"),
        ("once", "not by 'once'"),
        ("gossip", "not by 'gossip'"),
        ("sync(drop_slowest=2)", "drop_slowest=2"),
        ("local(8, state=average)", "state=keep or state=forget"),
        ("block_momentum(8, nesterov=true)", "without nesterov"),
        ("nothing", "unknown consistency"),
    ):
        with pytest.raises(BadInput, match=sentence):
            laconic.elastic(model, optimizer, laconic.Samples(4, 2), tmp_path, consistency=way)


def test_a_state_of_another_mode_is_refused(tmp_path: Path) -> None:
    def job(consistency: str) -> Any:
        model, _, _ = problem()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        folder = tmp_path / consistency
        return laconic.elastic(model, optimizer, laconic.Samples(SAMPLES, BATCH), folder, consistency=consistency)

    with job("sync") as plain, job("block_momentum(4)") as blocks:
        with pytest.raises(BadInput, match=r"'extra\.steps' is missing"):
            blocks.load_state_dict(plain.state_dict())
        plain.load_state_dict(plain.state_dict())
        blocks.load_state_dict(blocks.state_dict())


def _fragments_by_hand(way: str, parts: int) -> Tensor:
    """As `_by_hand`, with a fragment at a time; written for three fragments of the four parameters' sizes."""
    mode: Any = way_for(way)
    workers = [problem() for _ in range(parts)]
    optimizers = [torch.optim.SGD(model.parameters(), 0.1, momentum=0.9) for model, _, _ in workers]
    flat = lambda model: torch.cat([p.detach().reshape(-1) for p in model.parameters()])  # noqa: E731
    ledger, theta = SampleLedger(SAMPLES, BATCH), flat(workers[0][0])
    cuts = [each.part for each in fragments_of(list(workers[0][0].parameters()), mode.fragments, mode.period)]
    velocity, own, agreed = torch.zeros_like(theta), [theta.clone() for _ in range(parts)], 0
    while ledger.epoch < EPOCHS:
        steps = (agreed + 1) * mode.period // mode.fragments - agreed * mode.period // mode.fragments
        block = ledger.block(parts, steps)
        total = sum(len(share) for shares in block for share in shares)
        whole = total == ledger.remaining
        part = slice(None) if whole else cuts[(agreed + 1) % mode.fragments]
        mean = torch.zeros_like(theta)
        for place, ((model, x, y), optimizer) in enumerate(zip(workers, optimizers, strict=True)):
            nn.utils.vector_to_parameters(own[place].clone(), model.parameters())
            for shares in block:
                optimizer.zero_grad()
                nn.functional.cross_entropy(model(x[shares[place]]), y[shares[place]]).backward()
                optimizer.step()
            own[place] = flat(model)
            mean += sum(len(shares[place]) for shares in block) / total * own[place]
        gradient = theta[part] - mean[part]
        velocity[part] = mode.momentum * velocity[part] + gradient
        theta[part] -= mode.learning_rate * (gradient + mode.momentum * velocity[part])
        for each in own:
            each[part] = theta[part] if whole else (1 - mode.mix) * theta[part] + mode.mix * each[part]
        agreed = 0 if whole else agreed + 1
        ledger.commit(parts, range(parts), steps)
    return theta


@pytest.mark.parametrize(
    "way",
    [
        "diloco(6, fragments=3, momentum=0.5)",
        "diloco(4, fragments=2, momentum=0.5, mix=0.25)",
        "diloco(3, momentum=0.5, mix=0.5)",
        "diloco(32, fragments=3, momentum=0.5)",
    ],
)
def test_fragments_are_what_their_formula_says(way: str, tmp_path: Path) -> None:
    workers = [Trainer(tmp_path, workers=2, consistency=way) for _ in range(2)]
    for worker in workers:
        worker.ended()
    expected = _fragments_by_hand(way, 2)
    for worker in workers:
        torch.testing.assert_close(worker.weights, expected, rtol=1e-4, atol=1e-5)
    assert_alike(workers)


@pytest.mark.parametrize("codec", ["none", "dynamic8"])
def test_members_that_come_and_go_agree_on_fragments(codec: str, tmp_path: Path) -> None:
    workers = come_and_go(tmp_path, 29, consistency="diloco(4, fragments=2, momentum=0.3, mix=0.2)", codec=codec)
    for worker in workers[1:]:
        assert max(worker.digests) == EPOCHS * SAMPLES // BATCH
        assert worker.loss < 0.35, "it does not learn"
    assert_alike([workers[1], workers[0], *workers[2:]])
    ends = [worker.weights for worker in workers[1:]]
    assert all(torch.equal(each, ends[0]) for each in ends), "one model for all"


def test_a_fragments_block_that_is_given_up_leaves_everything_as_it_was() -> None:
    model, x, y = problem()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    replica = Replica(model, optimizer, SampleLedger(SAMPLES, BATCH))
    work = FragmentWork(replica, Diloco(4, fragments=2, mix=0.5), relative=False)

    def make(steps: int) -> None:
        for _ in range(steps):
            batch = work.share(2, 0)
            nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
            work.step()

    make(2)
    own = torch.empty(work.parts[work.turn].stop - work.parts[work.turn].start)
    work.write(own)
    work.apply(own, 2, (0, 1))
    theirs, mine = digest(work.committed), digest(replica.weights.values)
    assert theirs != mine, "a worker goes on from weights of its own"
    saved = replica.save()
    make(1)
    assert digest(work.committed) == theirs
    work.abandon()
    assert (digest(work.committed), digest(replica.weights.values)) == (theirs, mine)
    # A newcomer begins at what all have agreed on.
    other = Replica(*(lambda m: (m, torch.optim.SGD(m.parameters(), 0.1, momentum=0.9)))(problem()[0]),
                    SampleLedger(SAMPLES, BATCH))  # fmt: skip
    newcomer = FragmentWork(other, Diloco(4, fragments=2, mix=0.5), relative=False)
    other.load(saved)
    assert digest(newcomer.committed) == digest(other.weights.values) == theirs
    assert newcomer.turn == work.turn


@pytest.mark.parametrize("codec", ["none", "dynamic8"])
def test_a_job_resumed_between_two_fragments_ends_with_the_same_bits(codec: str, tmp_path: Path) -> None:
    def train(folder: str, first: int, last: int, state: Any = None) -> tuple[Tensor, Any]:
        model, x, y = problem()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
        way = "diloco(6, fragments=3, momentum=0.5, mix=0.5, alone=true)"
        options = {"meeting": tmp_path / folder, "consistency": way, "codec": codec, **_data(3)}
        with laconic.elastic(model, optimizer, **options) as job:
            if state is not None:
                model.load_state_dict(state[0])
                optimizer.load_state_dict(state[1])
                job.load_state_dict(state[2])
            for made, batch in enumerate(job.batches(), first):
                if made == last:
                    break
                nn.functional.cross_entropy(model(x[batch]), y[batch]).backward()
                job.step()
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict(), job.state_dict()))
        return torch.cat([p.detach().reshape(-1) for p in model.parameters()]), kept

    expected, _ = train("whole", 0, 1000)
    between, state = train("first", 0, 10)
    assert state[2]["extra"]["fragments"], "in the middle of a period"
    assert not torch.equal(between, state[2]["common"])
    found, _ = train("second", 10, 1000, state)
    assert torch.equal(found, expected)


def test_a_worker_cannot_be_left_out_of_fragments(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="leave these out, or fragments and mix"):
        Trainer._train(_Untrained(tmp_path, consistency="diloco(4, fragments=2)", drop_slowest=1))


class _Untrained(Trainer):
    def start(self) -> None:
        """Let the test call `_train` itself, for its error."""
