"""YellowFin: the closed form, quadratics, its state, and the loop that corrects momentum under staleness."""

from __future__ import annotations

import copy
from collections import deque

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

import laconic
from laconic.errors import BadInput
from laconic.workloads.yellowfin import YellowFin, single_step

positive = st.floats(1e-4, 1e4)


@given(positive, positive, positive, st.floats(1.0, 1e4))
@example(variance=1.0, distance=1520.0, least=3050.0, wide=1.0)
@example(variance=1.0, distance=3066.0, least=3066.0, wide=1.0)
def test_no_other_momentum_is_better_in_one_step(variance: float, distance: float, least: float, wide: float) -> None:
    """Against a search over a grid of √μ, from the formula alone."""
    momentum, rate = single_step(variance, distance, least, least * wide)
    lowest = (np.sqrt(wide) - 1) / (np.sqrt(wide) + 1)
    roots = np.linspace(lowest, 1 - 1e-6, 4001)
    costs = roots**2 * distance**2 + ((1 - roots) ** 2 / least) ** 2 * variance
    cost = momentum * distance**2 + rate**2 * variance
    assert cost <= costs.min() * (1 + 1e-6) + 1e-12
    assert np.sqrt(momentum) >= lowest - 1e-9


def _steps(optimizer: torch.optim.Optimizer, weight: torch.Tensor, count: int, seed: int = 0) -> None:
    chance = torch.Generator().manual_seed(seed)
    scale = torch.tensor([1.0, 5.0, 20.0])
    for _ in range(count):
        optimizer.zero_grad()
        noise = 0.1 * torch.randn(3, generator=chance)
        (0.5 * (scale * weight * weight).sum() + (noise * weight).sum()).backward()
        optimizer.step()


def test_a_noisy_quadratic_is_solved_and_state_goes_on_to_the_bit() -> None:
    weight = torch.nn.Parameter(torch.tensor([3.0, -2.0, 1.0]))
    optimizer = YellowFin([weight])
    _steps(optimizer, weight, 300)
    assert 0.5 * (torch.tensor([1.0, 5.0, 20.0]) * weight.detach() ** 2).sum() < 0.1 * 24.5  # what it began with
    assert 0 < optimizer.tuned["momentum"] < 1
    other = torch.nn.Parameter(weight.detach().clone())
    again = YellowFin([other])
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    _steps(optimizer, weight, 5, seed=1)
    _steps(again, other, 5, seed=1)
    assert torch.equal(weight, other)


def test_staleness_counts_as_momentum_so_less_is_applied() -> None:
    """The gradient of each step is three steps old, and the optimiser is told so."""
    weight, trail = torch.nn.Parameter(torch.tensor([3.0, -2.0, 1.0])), deque[torch.Tensor](maxlen=4)
    optimizer = YellowFin([weight], gain=0.05)
    for _ in range(200):
        trail.append(weight.detach().clone())
        weight.grad = torch.tensor([1.0, 5.0, 20.0]) * trail[0]
        optimizer.param_groups[0]["staleness"] = len(trail) - 1
        optimizer.step()
    tuned = optimizer.tuned
    assert tuned["momentum"] < tuned["target"]
    assert tuned["total"] > tuned["momentum"]
    assert bool(weight.isfinite().all())


def test_bad_options_are_refused() -> None:
    with pytest.raises(BadInput, match="beta is in"):
        YellowFin([torch.nn.Parameter(torch.zeros(1))], beta=1.0)


def _train(world: laconic.World, mode: str) -> tuple[float, float, int]:
    """Two workers on a quadratic; the loss at the end, the loss at the start, and the largest staleness."""
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 1)
    x = torch.randn(64, 8, generator=torch.Generator().manual_seed(world.rank))
    y = x @ torch.full((8, 1), 0.5)
    optimizer = YellowFin(model.parameters())
    job = laconic.distribute(model, optimizer, codec="none", consistency=mode, world=world)
    first = float(torch.nn.functional.mse_loss(model(x), y).detach())
    for _ in range(150):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    job.finish()
    last = float(torch.nn.functional.mse_loss(model(x), y).detach())
    stale = max((record.staleness or 0) for record in job.records)
    job.close()
    return last, first, stale


def _ranks(mode: str) -> tuple[float, float, int]:
    with laconic.init() as world:
        return _train(world, mode)


@pytest.mark.processes
@pytest.mark.parametrize("mode", ["async", "stale(2)", "stale(2, central=false)", "sync"])
def test_it_trains_in_asynchronous_and_stale_modes(mode: str) -> None:
    for last, first, _ in laconic.transports.run_local(2, _ranks, (mode,)):
        assert last < 0.5 * first
