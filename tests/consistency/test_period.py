"""period="auto": unbiased noise and drift of workers, a bounded rule, the same period on all workers and resumed."""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

import laconic
from laconic.consistency.period import (
    APART,
    LONGER,
    Parting,
    blocks_apart,
    next_period,
    parting_of,
    period_budget,
)
from laconic.errors import BadInput, UnknownName
from laconic.transports import run_threads

# estimates


def _measured(first: NDArray[np.float64], later: NDArray[np.float64]) -> Parting:
    """What workers' movements, (workers, values) of two blocks, tell."""
    square = ((first**2).sum(1).mean() + (later**2).sum(1).mean()) / 2
    mean_square = ((first.mean(0) ** 2).sum() + (later.mean(0) ** 2).sum()) / 2
    product, mean_product = (first * later).sum(1).mean(), (first.mean(0) * later.mean(0)).sum()
    return parting_of(float(square), float(mean_square), float(product), float(mean_product), len(first))


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_noise_and_drift_are_unbiased(workers: int) -> None:
    random, trials, numel = np.random.default_rng(workers), 3000, 20
    shared, sigma, tau = np.linspace(-1, 1, numel), np.linspace(0.5, 3, numel), np.linspace(2, 0, numel)
    found = []
    for _ in range(trials):
        drift = tau * random.standard_normal((workers, numel))
        blocks = (shared + drift + sigma * random.standard_normal((workers, numel)) for _ in range(2))
        parting = _measured(*blocks)
        found.append((parting.noise, parting.drift))
    for values, wanted in zip(np.array(found).T, ((sigma**2).sum(), (tau**2).sum()), strict=True):
        assert abs(values.mean() - wanted) < 5 * values.std() / math.sqrt(trials)


def _movements(period: int, drift: float, momentum: float, seed: int) -> list[NDArray[np.float64]]:
    """How far two workers move in two blocks that are compared: noise of variance 1 a step, drawn apart by `drift`."""
    random, numel = np.random.default_rng(seed), 4000
    apart = drift * random.standard_normal((2, numel))
    velocity, blocks = np.zeros((2, numel)), []
    for _ in range(3 + blocks_apart(period)):
        moved = np.zeros((2, numel))
        for _ in range(period):
            velocity = momentum * velocity + (1 - momentum) * (random.standard_normal((2, numel)) + apart)
            moved += velocity
        blocks.append(moved)
    return [blocks[2], blocks[2 + blocks_apart(period)]]


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_noise_adds_up_and_drift_squared_with_the_period(momentum: float) -> None:
    short, long = (_measured(*_movements(period, 0.1, momentum, 1)) for period in (40, 80))
    assert short.share == pytest.approx(40 * 0.1**2, rel=0.35)  # of finite blocks: momentum holds some noise back
    assert long.share == pytest.approx(2 * short.share, rel=0.25)


@pytest.mark.parametrize("period", [1, 4, 16, 64])
def test_momentum_is_not_taken_for_drift(period: int) -> None:
    assert abs(_measured(*_movements(period, 0.0, 0.9, 2)).share) < 0.1
    assert blocks_apart(period) * period - period >= APART


def test_share_of_what_does_not_move_apart() -> None:
    assert Parting(1.0, 0.0, 0.0).share == 0.0
    assert Parting(1.0, 2.0, -0.1).share == 0.0
    assert Parting(1.0, 0.0, 0.5).share == math.inf


# the rule


@pytest.mark.parametrize("share_a_step", [0.0, *np.geomspace(1e-4, 0.1, 30).tolist(), math.inf])
@pytest.mark.parametrize("budget", [0.05, 0.2, 1.0])
def test_the_period_settles_where_the_budget_is_kept(share_a_step: float, budget: float) -> None:
    first, least, most = 50, 6, 400
    period, periods = first, []
    for _ in range(12):
        former, period = period, next_period(period, share_a_step * period, budget, least, most)
        assert least <= period <= most
        assert former // 2 <= period <= 2 * former
        periods.append(period)
    assert len(set(periods[-4:])) == 1  # no going back and forth
    assert share_a_step * period <= budget or period == least
    assert period == most or 2 * share_a_step * period > LONGER * budget


# training

NUMEL, RATE = 600, 0.05


class _Apart(nn.Module):
    """Weights that each worker draws to a place of its own, by noisy gradients."""

    def __init__(self, rank: int, drift: float) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.ones(NUMEL // 2)), nn.Parameter(torch.ones(NUMEL // 2))
        apart = torch.randn(NUMEL, generator=torch.Generator().manual_seed(7))
        self.place, self.rank = (drift if rank else -drift) * apart, rank

    def forward(self, step: int) -> Tensor:
        noise = torch.randn(NUMEL, generator=torch.Generator().manual_seed(1000 * self.rank + step))
        weights = torch.cat([self.first, self.last])
        return (weights - self.place).square().sum() / 2 + (weights * noise).sum()


def _begun(transport: Any, drift: float, mode: str, **options: Any) -> tuple[_Apart, torch.optim.Optimizer, Any]:
    model = _Apart(transport.rank, drift)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    given: dict[str, Any] = {"period": "auto", "codec": "none", **options}
    job = laconic.distribute(model, optimizer, consistency=mode, world=laconic.World(transport), **given)
    return model, optimizer, job


def _train(model: _Apart, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        model(step).backward()
        optimizer.step()


def _weights(model: _Apart) -> Tensor:
    return torch.cat([model.first, model.last]).detach().clone()


MODES = ["local(8)", "diloco(8, fragments=2, delay=2, mix=0.5)"]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("drift", [0.0, 0.2])
def test_workers_take_the_same_period_as_their_drift_says(mode: str, drift: float) -> None:
    def work(transport: Any) -> Any:
        model, optimizer, job = _begun(transport, drift, mode)
        _train(model, optimizer, range(420))
        text, metrics, reviews = job.explain(), job.metrics(), job.auto_period.reviews
        job.finish()
        end = _weights(model)
        job.close()
        return reviews, metrics["period"], metrics["drift_of_noise"], text, end

    (reviews, period, share, text, end), other = run_threads(2, work)
    assert reviews == other[0]
    assert torch.equal(end, other[4])
    assert f": {period}; " in text
    assert "of the noise, 0.2 allowed" in text
    if drift:
        assert period < 8
        assert reviews[0].share > 0.2
    else:
        assert period > 16
        assert share <= 0.2


@pytest.mark.parametrize(("mode", "kept_at"), [(MODES[0], 20), (MODES[0], 51), (MODES[1], 58), (MODES[1], 66)])
def test_a_resumed_training_has_the_same_bits(mode: str, kept_at: int) -> None:
    """Before the first comparison and in the middle of it, with a fragment under way, and by another period."""

    def work(transport: Any) -> None:
        whole, optimizer, job = _begun(transport, 0.2, mode, codec="dynamic8")
        _train(whole, optimizer, range(180))
        wanted, reviews = _weights(whole), job.auto_period.reviews
        assert len(reviews) > 1
        assert reviews[0].period < 8
        job.close()
        first, optimizer, job = _begun(transport, 0.2, mode, codec="dynamic8")
        _train(first, optimizer, range(kept_at))
        state, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(first.state_dict())
        job.close()
        second, optimizer, job = _begun(transport, 0.2, mode, codec="dynamic8")
        second.load_state_dict(weights)
        optimizer.load_state_dict(state)
        _train(second, optimizer, range(kept_at, 180))
        assert job.auto_period.reviews == reviews
        assert torch.equal(_weights(second), wanted)
        job.close()

    run_threads(2, work)


def test_sites_take_one_period() -> None:
    """Both ranks of a site have the same weights, and see what the sites' movements say."""

    def work(transport: Any) -> Any:
        model, optimizer, job = _begun(transport, 0.2, "local(8)", sites=2)
        _train(model, optimizer, range(60))
        found = job.auto_period.reviews, job.mode.period
        job.close()
        return found

    found = run_threads(4, work)
    assert found[0][1] < 8
    assert all(each == found[0] for each in found)


def test_a_risen_loss_makes_the_period_shorter_and_not_longer() -> None:
    """One rank reports: 1, twice 3, and 1 again."""

    def work(transport: Any) -> Any:
        model, optimizer, job = _begun(transport, 0.0, "local(8)")
        losses = iter((1.0, 3.0, 3.0, 1.0))
        step, periods = 0, []
        for ends in range(1, 5):
            if transport.rank == 1:
                job.report_loss(next(losses))
            while len(job.auto_period.reviews) < ends:
                _train(model, optimizer, range(step, step + 1))
                step += 1
            periods.append(job.auto_period.period)
        text = job.explain()
        halvings = job.auto_period.loss.halvings
        job.close()
        return periods, halvings, text

    one, other = run_threads(2, work)
    assert one[:2] == other[:2]
    assert one[:2] == ([16, 8, 4, 4], 1)
    assert "the reported loss has risen, so 1/2 of it" in one[2]


def test_what_is_not_finite_is_not_compared() -> None:
    """A NaN in a block that is compared: the period stays, and what comes after is measured anew."""

    def work(transport: Any) -> Any:
        model, optimizer, job = _begun(transport, 0.0, "local(8)")
        _train(model, optimizer, range(52))
        if transport.rank:
            model.first.data[3] = math.nan
        _train(model, optimizer, range(52, 56))
        found = [(job.auto_period.verdict, job.mode.period)]
        for parameter in model.parameters():
            parameter.data.fill_(1.0)  # as from a checkpoint
        _train(model, optimizer, range(56, 112))
        found.append((job.auto_period.verdict, job.mode.period))
        job.close()
        return found

    one, other = run_threads(2, work)
    assert one == other
    assert one[0] == ("kept: weights were not finite", 8)
    assert "at step 112 drift is" in one[1][0]


def test_weights_that_stay_keep_the_period() -> None:
    def work(transport: Any) -> Any:
        model, optimizer, job = _begun(transport, 0.0, "local(8)")
        for group in optimizer.param_groups:
            group["lr"] = 0.0
        _train(model, optimizer, range(120))
        found = job.auto_period.reviews, job.mode.period
        job.close()
        return found

    assert run_threads(2, work)[0] == ([], 8)


def test_finish_begins_anew() -> None:
    def work(transport: Any) -> Any:
        model, optimizer, job = _begun(transport, 0.0, "local(8)")
        _train(model, optimizer, range(50))
        job.finish()
        _train(model, optimizer, range(50, 106))
        found = [(review.step, review.period) for review in job.auto_period.reviews]
        job.close()
        return found

    assert run_threads(2, work)[0] == [(106, 16)]


def test_one_worker_keeps_its_period() -> None:
    model = _Apart(0, 0.1)
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    for mode in ("local(4)", "diloco(4, alone=true)"):
        with laconic.distribute(model, optimizer, consistency=mode, period="auto") as job:
            _train(model, optimizer, range(9))
            assert "one worker has no others to part from" in job.explain()
            assert job.metrics()["period"] == 4


def test_the_budget_is_that_of_the_noise() -> None:
    assert period_budget("auto", "8bit") == period_budget("auto", None) == 0.2
    assert period_budget("auto", "noise(0.5)") == 0.5
    assert period_budget("auto(0.3)", "noise(0.5)") == 0.3


def test_wrong_use_is_one_sentence() -> None:
    model = _Apart(0, 0.1)

    def refused(mode: Any, period: Any = "auto") -> None:
        laconic.distribute(model, torch.optim.SGD(model.parameters(), RATE), consistency=mode, period=period)

    for mode in ("sync", "once", "easgd"):
        with pytest.raises(BadInput, match=f"'{mode}' has no option period; it goes with modes of blocks"):
            refused(mode)
    with pytest.raises(BadInput, match="a plan of modes says each period"):
        refused({0: "local(4)", 100: "local(8)"})
    for period in ("automatic", 8, "8"):
        with pytest.raises(BadInput, match="period"):
            refused("local(8)", period)
    with pytest.raises(BadInput, match="the budget of period 'auto' is above 0"):
        refused("local(8)", "auto(0)")
    with pytest.raises(BadInput, match="give the first here and period='auto' to distribute"):
        refused("local(auto)")
    with pytest.raises(UnknownName, match="option of elastic 'period'"):
        laconic.elastic(model, torch.optim.SGD(model.parameters(), RATE), None, period="auto")  # type: ignore[arg-type]
    job = laconic.distribute(model, torch.optim.SGD(model.parameters(), RATE), consistency="local(8)")
    with pytest.raises(BadInput, match="report_loss is for what is chosen by noise"):
        job.report_loss(1.0)
    job.close()
    optimizer = torch.optim.SGD(model.parameters(), RATE)
    with laconic.distribute(model, optimizer, consistency="local(8)", period="auto") as job:
        with pytest.raises(BadInput, match="report_loss takes a number"):
            job.report_loss("1.0")  # type: ignore[arg-type]
        state = job.state_dict()
        with pytest.raises(BadInput, match="a period of 80 steps, this job periods from 1 to 64"):
            job.check_state({**state, "period": {**state["period"], "period": 80}})
