"""Optimisers that evaluate a closure: every worker sees the same loss and gradients, and takes the same decisions."""

from __future__ import annotations

import runpy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency import get, names
from laconic.errors import BadInput
from laconic.transports.launcher import run_local

EXAMPLE = Path(__file__).parents[2] / "examples" / "lbfgs_digits.py"


def _weights(model: nn.Module) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _example() -> dict[str, Any]:
    torch.set_num_threads(1)
    model, accuracy = runpy.run_path(str(EXAMPLE))["train"](5)
    losses = _closure_once()
    laconic.init().close()
    return {"weights": _weights(model), "accuracy": accuracy, "losses": losses}


def _closure_once() -> list[float]:
    """An optimiser that evaluates once, with a codec and momentum."""
    torch.manual_seed(0)
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    job = laconic.distribute(model, optimizer, codec="dynamic8")
    x = torch.full((1, 40), 1.0 + job.world.rank)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        return loss

    losses = [float(optimizer.step(closure)) for _ in range(3)]
    assert job.step == 3
    job.close()
    return losses


@pytest.mark.processes
def test_l_bfgs_takes_one_road_on_all_workers() -> None:
    ranks = run_local(2, _example, timeout_s=100)
    torch.set_num_threads(1)
    (alone,) = run_local(1, _example, timeout_s=100)
    assert torch.equal(ranks[0]["weights"], ranks[1]["weights"])
    # The same line search up to rounding: sums of two halves instead of one, over some fifty evaluations.
    torch.testing.assert_close(ranks[0]["weights"], alone["weights"], rtol=0.02, atol=0.02)
    assert min(ranks[0]["accuracy"], alone["accuracy"]) > 0.93
    assert ranks[0]["losses"] == ranks[1]["losses"]
    assert ranks[0]["losses"][-1] < ranks[0]["losses"][0]


def _refusals() -> dict[str, str]:
    found = {}
    with laconic.init(timeout_s=30):
        for spec in (spec for name in names() for spec in get(name).examples):
            model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            job = laconic.distribute(model, optimizer, consistency=spec, codec="none")
            try:
                optimizer.step(lambda: torch.tensor(0.0))
                found[spec] = "stepped"
            except BadInput as error:
                found[spec] = str(error)
            laconic.barrier()
            job.close()
    return found


@pytest.mark.processes
def test_modes_without_a_meaning_for_closures_say_so() -> None:
    for found in run_local(2, _refusals, timeout_s=100):
        assert found.pop("sync") == "stepped"
        assert set(found.values()) == {
            "a closure goes with consistency 'sync', whose workers agree on gradients and loss at every evaluation; "
            "else step without it"
        }
