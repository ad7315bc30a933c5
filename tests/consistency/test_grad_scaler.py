"""torch.amp.GradScaler with `distribute`: all workers skip a step or none does, and what is exchanged is unscaled."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.transports.launcher import run_local

STEPS, OVERFLOW = 6, {1: 0, 4: 1}  # at these steps this rank's loss is infinite


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(40, 40)


def _loss(model: nn.Module, step: int, rank: int) -> Tensor:
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(10 * step + rank))
    loss = model(x).square().mean()
    return loss * float("inf") if OVERFLOW.get(step) == rank else loss


def _train(consistency: str, overlap: bool | None, clips: bool) -> dict[str, Any]:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    options = {} if overlap is None else {"overlap": overlap}
    job = laconic.distribute(model, optimizer, consistency=consistency, codec="none", **options)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
    for step in range(STEPS):
        optimizer.zero_grad()
        scaler.scale(_loss(model, step, job.world.rank)).backward()
        if clips:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1e6)
        scaler.step(optimizer)
        scaler.update()
    job.finish()
    steps = job.step
    weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
    job.close()
    return {"weights": weights, "steps": steps, "scale": scaler.get_scale()}


CASES = {
    "in step()": ("sync", False, False),
    "overlapped": ("sync", None, False),
    "unscaled by the user": ("sync", None, True),
    "local": ("local(2)", None, False),
}


def _all() -> dict[str, Any]:
    torch.set_num_threads(1)
    with laconic.init(timeout_s=30):
        return {name: _train(*case) for name, case in CASES.items()}


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local(2, _all, timeout_s=90)


def _expected() -> Tensor:
    """One process on both ranks' samples that leaves the same steps out."""
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    for step in set(range(STEPS)) - OVERFLOW.keys():
        optimizer.zero_grad()
        ((_loss(model, step, 0) + _loss(model, step, 1)) / 2).backward()
        optimizer.step()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


@pytest.mark.processes
@pytest.mark.parametrize("case", CASES)
def test_all_workers_skip_a_step_or_none_does(case: str, ranks: list[dict[str, Any]]) -> None:
    for found in (rank[case] for rank in ranks):
        assert found["steps"] == STEPS - len(OVERFLOW)
        assert torch.isfinite(found["weights"]).all()
        assert torch.equal(found["weights"], ranks[0][case]["weights"])
        if case != "local":
            torch.testing.assert_close(found["weights"], _expected(), rtol=1e-4, atol=1e-5)
    assert all(rank[case]["scale"] == 2.0**9 for rank in ranks)  # each rank's own overflow halves its own scale
