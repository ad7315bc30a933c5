"""Divided models on real ranks: groups that train together, a peer that dies, and the memory of a layer."""

from __future__ import annotations

import resource
import time

import pytest
import torch
from torch import nn

from laconic.consistency.distribute import distribute
from laconic.errors import PeerLost
from laconic.parallel.divide import divide
from laconic.parallel.state import whole_state
from laconic.transports.launcher import run_local
from laconic.transports.world import init

PLAN = "0=dense(output); 2=dense(input)"


def _net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))


def _batch(group: int, step: int) -> torch.Tensor:
    return torch.randn(5, 6, generator=torch.Generator().manual_seed(10 * step + group))


def _grouped() -> tuple[dict[str, torch.Tensor], float]:
    """Two groups of two: divided inside, `distribute` between."""
    with init() as world:
        group = world.rank // 2
        inside = world.split([rank // 2 for rank in range(4)])
        between = world.split([rank % 2 for rank in range(4)])
        model = divide(_net(), PLAN, world=inside)
        job = distribute(model, torch.optim.SGD(model.parameters(), 0.1), codec="none", world=between)
        for step in range(3):
            job.optimizer.zero_grad()
            model(_batch(group, step)).square().mean().backward()
            job.optimizer.step()
        job.finish()
        return whole_state(model), float(sum(p.numel() for p in model.parameters()))


def test_divided_in_groups_and_distributed_between_them() -> None:
    alone = _net()
    optimizer = torch.optim.SGD(alone.parameters(), 0.1)
    for step in range(3):
        optimizer.zero_grad()
        x = torch.cat([_batch(group, step) for group in range(2)])
        alone(x).square().mean().backward()
        optimizer.step()
    whole = sum(p.numel() for p in alone.parameters())
    found = run_local(4, _grouped, timeout_s=100)
    for state, _ in found:
        for key, value in alone.state_dict().items():
            torch.testing.assert_close(state[key], value, rtol=1e-5, atol=1e-6)
    assert found[0][1] + found[1][1] == whole  # a rank holds its half of everything


def _bereaved() -> str:
    with init(timeout_s=4) as world:
        model = divide(_net(), PLAN, codec="dynamic8", world=world)
        x = torch.ones(4, 6, requires_grad=True)
        y = model(x).sum()
        if world.rank == 1:  # in the midst of a step: the others wait in backward
            return "left"
        begun = time.monotonic()
        with pytest.raises(PeerLost, match="peer 1") as caught:
            y.backward()
        assert time.monotonic() - begun < 30
        return str(caught.value)


def test_a_peer_that_is_lost_in_backward_is_named() -> None:
    found = run_local(2, _bereaved, timeout_s=60)
    assert "backward of 0" in found[0]
    assert "rank 0/2" in found[0]


def _large(width: int) -> tuple[float, float]:
    """Peak memory beyond what was there, in MB, of two steps with momentum; and the loss."""
    torch.set_num_threads(1)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(width, width, bias=False), nn.ReLU(), nn.Linear(width, width, bias=False))
    with init() as world:
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        torch.manual_seed(world.rank)
        model = divide(model, PLAN, world=world)
        optimizer = torch.optim.SGD(model.parameters(), 1e-3, momentum=0.9)
        for _ in range(2):
            optimizer.zero_grad()
            loss = model(torch.ones(2, width)).square().mean()
            loss.backward()
            optimizer.step()
        return (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024, float(loss)


@pytest.mark.slow
def test_a_model_that_fits_no_rank_trains_on_four() -> None:
    """200 million weights with gradients and momentum are 2.4 GB; four ranks hold 0.6 GB each."""
    for peak, loss in run_local(4, _large, (10_000,), timeout_s=300):
        assert 550 < peak < 1024
        assert loss == loss


def test_a_rank_holds_its_share_of_everything() -> None:
    peaks = [peak for peak, _ in run_local(4, _large, (2_000,), timeout_s=100)]
    assert max(peaks) < 60  # of 96 MB: weights, gradients and momentum of 8 million weights


