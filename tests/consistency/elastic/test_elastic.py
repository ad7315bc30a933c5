"""Elastic training and backup workers, for real; kills by the dozen are in tests/benchmarks/test_soak.py."""

from __future__ import annotations

import copy
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.errors import BadInput
from laconic.transports.launcher import LocalJob, run_local

pytestmark = pytest.mark.processes


def _backup(drop_slowest: int, steps: int, pause_s: float) -> dict[str, Any]:
    with laconic.init(timeout_s=60) as world:
        torch.manual_seed(world.rank)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        job = laconic.distribute(model, optimizer, consistency=f"sync(drop_slowest={drop_slowest})", world=world)
        if world.rank == world.world_size - 1:
            time.sleep(pause_s)  # a straggler from the first step on
        begun = time.monotonic()
        for step in range(steps):
            generator = torch.Generator().manual_seed(100 * world.rank + step)
            optimizer.zero_grad()
            model(torch.randn(16, 8, generator=generator)).square().mean().backward()
            optimizer.step()
        seconds = time.monotonic() - begun
        job.finish()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        job.close()
        return {"weights": weights, "seconds": seconds}


def test_a_straggler_is_not_waited_for_and_ends_with_the_same_weights() -> None:
    results = run_local(3, _backup, (1, 20, 3.0), timeout_s=100)
    for found in results:
        assert torch.equal(found["weights"], results[0]["weights"])
    alone = run_local(3, _backup, (0, 20, 0.0), timeout_s=100)
    assert not torch.equal(alone[0]["weights"], results[0]["weights"]), "the straggler's gradients were left out"


def _gone_back() -> torch.Tensor:
    """Rank 1 has still to apply three means when both go back to the beginning, and train on other values."""
    with laconic.init(timeout_s=60) as world:
        model = nn.Linear(4, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        job = laconic.distribute(model, optimizer, consistency="sync(drop_slowest=1)", world=world)
        saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))

        def train(value: float, steps: int, pause_s: float = 0.0) -> None:
            for _ in range(steps):
                time.sleep(pause_s)
                optimizer.zero_grad()
                model(torch.full((2, 4), value)).mean().backward()
                optimizer.step()

        train(1.0, 5 if world.rank == 0 else 0)
        laconic.barrier()
        train(1.0, 2 if world.rank == 1 else 0)
        model.load_state_dict(saved[0])
        optimizer.load_state_dict(saved[1])
        laconic.barrier()
        train(2.0, 5, 0.1 if world.rank == 0 else 0.0)
        job.finish()
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters()])
        job.close()
        return weights


def test_means_of_a_training_that_was_given_up_are_not_applied() -> None:
    first, second = run_local(2, _gone_back, timeout_s=100)
    assert torch.equal(first, second)


def _late(steps: int, pause_s: float) -> int:
    """The last rank is slow; the others wait for it in finish()."""
    with laconic.init(timeout_s=4) as world:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        job = laconic.distribute(model, optimizer, consistency="sync(drop_slowest=1)", world=world, codec="none")
        for _ in range(steps):
            time.sleep(pause_s if world.rank == world.world_size - 1 else 0.0)
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        job.finish()
        made = job.step
        job.close()
        return made


@pytest.mark.slow
def test_a_straggler_that_goes_on_may_take_longer_than_the_time_out() -> None:
    assert run_local(3, _late, (8, 0.8), timeout_s=100) == [8, 8, 8]


def _many_steps(folder: str) -> float:
    """Train for long; leave a file when half is done."""
    with laconic.init(timeout_s=60) as world:
        model = nn.Linear(8, 1)
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        job = laconic.distribute(model, optimizer, consistency="sync(drop_slowest=1)", world=world, codec="none")
        Path(folder, f"pid{world.rank}").write_text(str(os.getpid()))
        for _ in range(2000):
            optimizer.zero_grad()
            model(torch.ones(4, 8)).square().mean().backward()
            optimizer.step()
        loss = float(model(torch.ones(8)).square())
        job.close()
        return loss


def test_a_killed_worker_costs_the_others_nothing_but_itself(tmp_path: Path) -> None:
    job = LocalJob(3, _many_steps, (str(tmp_path),))
    try:
        deadline = time.monotonic() + 90
        while not all((tmp_path / f"pid{rank}").exists() for rank in range(3)):  # all have met
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.kill(int((tmp_path / "pid2").read_text()), signal.SIGKILL)
        outcomes = job.outcomes(100, ranks=[0, 1])
    finally:
        job.kill()
    assert [outcome.error for outcome in outcomes] == [None, None]
    assert outcomes[0].value == outcomes[1].value


def test_backup_workers_take_no_codec() -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(BadInput, match="no codec"):
        laconic.distribute(model, optimizer, consistency="sync(drop_slowest=1)", codec="dynamic8")
    with pytest.raises(BadInput, match="drop_slowest is a number"):
        laconic.distribute(model, optimizer, consistency="sync(drop_slowest=-1)", codec="none")
