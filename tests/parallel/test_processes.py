"""Divided models on real ranks: groups that train together, a peer that dies, and the memory of a layer."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
from torch import nn

from laconic.consistency.distribute import distribute
from laconic.errors import PeerLost
from laconic.parallel import product
from laconic.parallel.divide import CONTEXT, divide
from laconic.parallel.state import whole_state
from laconic.transports.launcher import LocalJob, run_local
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


def _in_pieces() -> tuple[torch.Tensor, torch.Tensor | None, int]:
    """A step whose sums travel in pieces, under way while others are computed."""
    product.PIECE_NBYTES = 16
    with init() as world:
        model, x = divide(_net(), PLAN, world=world), _batch(0, 0).requires_grad_()
        y = model(x)
        y.square().mean().backward()
        return y.detach(), x.grad, getattr(model, CONTEXT).traffic.messages["2", "forward"]


@pytest.mark.parametrize("ranks", [2, 3])
def test_sums_in_pieces_are_those_of_one_process(ranks: int) -> None:
    x = _batch(0, 0).requires_grad_()
    y = _net()(x)
    y.square().mean().backward()
    for found, gradient, messages in run_local(ranks, _in_pieces, timeout_s=100):
        torch.testing.assert_close(found, y.detach())
        torch.testing.assert_close(gradient, x.grad)
        assert messages == product.PIECES * (1 if ranks == 2 else 2 * (ranks - 1))


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


def _bereaved(fault: int | None) -> str:
    world = init(timeout_s=4)
    model = divide(_net(), PLAN, codec="dynamic8", world=world)
    x = torch.ones(4, 6, requires_grad=True)
    y = model(x).sum()
    if world.rank == 1:  # in the midst of a step: the others wait in backward
        if fault is not None:
            os.kill(os.getpid(), fault)
        world.close()
        return "left"
    begun = time.monotonic()
    with pytest.raises(PeerLost, match="peer 1") as caught:
        y.backward()
    assert time.monotonic() - begun < 30
    return str(caught.value)


@pytest.mark.parametrize("fault", [None, signal.SIGKILL, signal.SIGSTOP])
def test_a_peer_that_leaves_dies_or_stops_in_backward_is_named(fault: int | None) -> None:
    for outcome in LocalJob(2, _bereaved, (fault,)).outcomes(timeout_s=60, ranks=(0,)):
        assert "backward of 0" in outcome.value, outcome
        assert "rank 0/2" in outcome.value
