"""Several workers shrink one model together: each calls `shrink` alike, and training goes through `distribute`."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import laconic
from laconic.shrinking import Plan, file
from laconic.transports.launcher import run_local
from laconic.workloads import get


def _shrink() -> tuple[bytes, list[int]]:
    """A rank's file, and how many values were trained in each call."""
    torch.set_num_threads(1)
    world, task, trained = laconic.init(), get("digits-mlp").prepare(seed=0), []

    def train(model: nn.Module) -> None:
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        trained.append(sum(p.numel() for p in model.parameters()))
        with laconic.distribute(model, optimizer, codec="none"):
            for step in range(4):
                optimizer.zero_grad()
                task.loss(model, task.batch(0, step, world.rank, world.world_size)).backward()
                optimizer.step()

    small = laconic.shrink(task.model, train, plan=Plan(density=0.2, bits=3, rounds=2))
    return file.dumps(small.parts), trained


@pytest.mark.processes
def test_workers_make_the_same_file() -> None:
    first, second = run_local(2, _shrink)
    assert first == second
    _, trained = first
    # Two rounds of pruning train all weights; the values that are tuned are some 8 of each matrix, and the biases.
    assert trained[0] == trained[1] == sum(p.numel() for p in get("digits-mlp").build(0).parameters())
    assert trained[2] <= 3 * 8 + 256 + 256 + 10
