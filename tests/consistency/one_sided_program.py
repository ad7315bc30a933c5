"""What the ranks of an MPI job do for `test_one_sided.py`; here, so that a rank need not import pytest."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import laconic
from tests.consistency.least_squares import train

NUMEL, STEPS = 1001, 30
SPECS = (
    "async(rma=true)", "async(push=2, pull=3, rma=true)", "hogwild(rma=true)", "gossip(asynchronous=true, rma=true)",
)  # fmt: skip


def _job(spec: str, learning_rate: float) -> tuple[Any, nn.Module, torch.optim.Optimizer]:
    model = nn.Linear(NUMEL, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), learning_rate)
    return laconic.distribute(model, optimizer, consistency=spec), model, optimizer


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, gradient: float) -> None:
    model.weight.grad = torch.full((1, NUMEL), gradient)
    optimizer.step()


def _alike(values: Tensor, world: Any) -> bool:
    rows = laconic.all_gather(values.clone(), group=world).view(world.world_size, -1)
    return all(torch.equal(row, rows[0]) for row in rows)


def all_of_it() -> dict[str, Any]:
    """Everything below, in one job: starting it takes longer than all of it."""
    return {"train": train_all(), "count": count(), "mix": mix()}


def train_all() -> dict[str, Any]:
    """Train least squares by all; whether all ranks ended with the same weights, and how far from the best."""
    found = {}
    with laconic.init(timeout_s=60) as world:
        for spec in SPECS:
            ended = train(spec, 80, world, codec=None)
            records = ended["records"]
            found[spec] = {
                "alike": _alike(ended["end"], world),
                "error": float((ended["end"] - 1).norm()),
                "sent": sum(record.sent_nbytes for record in records),
                "staleness": max(record.staleness for record in records),
            }
    return found


def count() -> dict[str, Any]:
    """Each update adds 1 to every weight; half of them after a restart from what all ranks saved."""
    with laconic.init(timeout_s=60) as world:
        job, model, optimizer = _job("hogwild(rma=true)", 1.0)
        for _ in range(STEPS):
            _step(model, optimizer, -1.0)
        laconic.barrier(group=world)
        saved, weights = optimizer.state_dict(), model.state_dict()
        job.close()
        job, model, optimizer = _job("hogwild(rma=true)", 1.0)
        model.load_state_dict(weights)
        optimizer.load_state_dict(saved)
        for _ in range(STEPS):
            _step(model, optimizer, -1.0)
        job.finish()
        least, most = float(model.weight.min()), float(model.weight.max())
        job.close()
    return {"least": least, "most": most, "expected": 2 * STEPS * world.world_size}


def mix() -> float:
    """Gossip without gradients from different points: how far all end from the mean of where they began."""
    with laconic.init(timeout_s=60) as world:
        job, model, optimizer = _job("gossip(random, asynchronous=true, rma=true)", 1.0)
        begun = torch.randn(NUMEL, generator=torch.Generator().manual_seed(world.rank))
        _step(model, optimizer, 0.0)
        model.weight.grad = -begun.view(1, -1)
        optimizer.step()
        for _ in range(STEPS):
            _step(model, optimizer, 0.0)
        job.finish()
        mean = laconic.all_reduce(begun, "mean", group=world)
        away = float((model.weight.detach().view(-1) - mean).abs().max())
        job.close()
    return away
