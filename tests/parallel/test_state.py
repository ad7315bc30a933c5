"""Checkpoints of a divided model are the whole model's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from laconic.errors import CheckpointError
from laconic.parallel.divide import divide
from laconic.parallel.state import load_whole, whole_state
from laconic.transports.threads import run_threads
from laconic.transports.world import World

PLANS = ["0=dense(output); 2=dense(input)", "0=dense(input)", "0=dense(summa); 2=dense(cannon)", "2=dense(1.5d)"]


def model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 5)).double()


def train(part: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        x = torch.full((4, 6), step / 10, dtype=torch.float64)
        optimizer.zero_grad()
        part(x).square().sum().backward()
        optimizer.step()


def on_four(plan: str, start: dict[str, Any] | None, steps: range, whole: nn.Module) -> dict[str, Any]:
    def work(transport):  # type: ignore[no-untyped-def]
        part = divide(copy.deepcopy(whole), plan, world=World(transport))
        optimizer = torch.optim.Adam(part.parameters(), 0.01)
        if start is not None:
            load_whole(part, copy.deepcopy(start), optimizer)
        train(part, optimizer, steps)
        return whole_state(part, optimizer)

    return run_threads(4, work)[0]


@pytest.mark.parametrize("second", PLANS)
@pytest.mark.parametrize("first", PLANS)
def test_any_division_goes_on_from_any_other(first: str, second: str) -> None:
    whole = model()
    alone = copy.deepcopy(whole)
    optimizer = torch.optim.Adam(alone.parameters(), 0.01)
    train(alone, optimizer, range(1, 7))
    half = on_four(first, None, range(1, 4), whole)
    assert half["model"].keys() == whole.state_dict().keys()
    end = on_four(second, half, range(4, 7), whole)
    for key, value in alone.state_dict().items():
        torch.testing.assert_close(end["model"][key], value, rtol=1e-9, atol=1e-11)
    plain = model()
    plain.load_state_dict(end["model"])
    torch.optim.Adam(plain.parameters()).load_state_dict(end["optimizer"])


def test_a_state_of_another_model_is_refused() -> None:
    whole = model()

    def work(transport):  # type: ignore[no-untyped-def]
        part = divide(copy.deepcopy(whole), PLANS[0], world=World(transport))
        with pytest.raises(CheckpointError, match="only in one of them"):
            load_whole(part, {})
        state = {key: value[:1] for key, value in whole.state_dict().items()}
        with pytest.raises(CheckpointError, match=r"is \(1, 6\) in the state and \(9, 6\) in the model"):
            load_whole(part, state)

    run_threads(2, work)


def test_what_an_optimiser_keeps_in_another_shape_is_refused() -> None:
    whole = model()

    def work(transport):  # type: ignore[no-untyped-def]
        part = divide(copy.deepcopy(whole), PLANS[0], world=World(transport))
        optimizer = torch.optim.Adafactor(part.parameters(), 0.01)
        train(part, optimizer, range(1, 2))
        with pytest.raises(CheckpointError, match="can be made neither whole nor divided"):
            whole_state(part, optimizer)

    run_threads(2, work)
