"""A batch that grows uses every sample once, and keeps the noise that a falling rate would have."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from laconic.errors import BadInput, UnknownName
from laconic.workloads import Changes, get
from laconic.workloads.batch_schedules import Constant, Grow, batch_schedule
from laconic.workloads.optimizers import steps_down, warmed_up

RATES = st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12)


@settings(max_examples=50)
@given(batch=st.integers(1, 64), rates=RATES, most=st.one_of(st.none(), st.integers(1, 500)))
def test_batches_only_grow_where_the_rate_falls(batch: int, rates: list[float], most: int | None) -> None:
    found = Grow(most).batches(batch, 1000, rates)
    limit = max(batch, most or 100)
    peak = 0.0
    for size, rate in zip(found, rates, strict=True):
        peak = max(peak, rate)
        assert size == min(limit, round(batch * peak / rate))
    assert Constant().batches(batch, 1000, rates) == (batch,) * len(rates)


def test_noise_is_that_of_the_falling_rate() -> None:
    """rate / batch, epoch by epoch, until the batch has grown to its most; from there on, too."""
    plain = get("digits-mlp")
    grown = Changes(batch_schedule="grow(400)").of("digits-mlp")
    tasks = [workload.prepare(seed=1) for workload in (plain, grown)]
    assert [task.global_batch(1, 0) for task in tasks] == [64, 64]
    assert tasks[1].global_batch(1, 19) == 400
    for epoch in (0, 7, 13, 19):
        noise = []
        for task in tasks:
            optimizer = task.optimizer(task.model.parameters())
            task.begin_step(optimizer, epoch, 0)
            noise.append(optimizer.param_groups[0]["lr"] / task.global_batch(1, epoch))
        assert noise[1] == pytest.approx(noise[0])


@pytest.mark.parametrize("ranks", [1, 3])
def test_every_sample_of_an_epoch_is_used_once(ranks: int) -> None:
    task = Changes(batch_schedule="grow").of("digits-mlp").prepare(seed=2)
    for epoch in (0, 19):
        steps = task.steps_per_epoch(ranks, epoch)
        taken = [task.batch(epoch, step, rank, ranks).y for step in range(steps) for rank in range(ranks)]
        assert sum(len(each) for each in taken) == len(task.data.train)
    assert task.steps_per_epoch(ranks, 19) < task.steps_per_epoch(ranks, 0)
    assert torch.equal(torch.sort(torch.cat(taken))[0], torch.sort(task.data.train.y)[0])


def test_warm_ups_leave_the_batch_alone() -> None:
    workload = replace(get("digits-mlp"), plan=warmed_up(0.2, steps_down(0.5)), epochs=10, batch_schedule=Grow(1000))
    assert workload.batches(10_000) == (64,) * 5 + (640,) * 5
    assert Grow(warm_up=0.1).rate(1.0, 64, 64, 0.0) == pytest.approx(0.1)
    assert Grow(warm_up=0.1).rate(1.0, 64, 64, 0.2) == 1.0


def test_bad_schedules_are_refused() -> None:
    with pytest.raises(UnknownName, match="grow"):
        batch_schedule("growing")
    with pytest.raises(BadInput, match="most is a number"):
        batch_schedule("grow(0)")
    with pytest.raises(BadInput, match="warm_up"):
        batch_schedule("grow(warm_up=2)")
    with pytest.raises(UnknownName, match="option"):
        Changes(batch_schedule="grow(least=3)").of("digits-mlp")
