"""`laconic.distribute(consistency="sync")`: equals the plain optimiser alone, the mean over ranks together."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.errors import BadInput, UnknownName
from laconic.transports.launcher import run_local


def _model(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(30, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 20), nn.Linear(20, 5))


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(8, 30, generator=torch.Generator().manual_seed(1000 * rank + step))


def _loss(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).square().mean()


@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.RMSprop])
def test_one_worker_equals_the_plain_optimiser(make: Any) -> None:
    plain, ours = _model(), _model()
    reference, optimizer = make(plain.parameters(), lr=0.01), make(ours.parameters(), lr=0.01)
    job = laconic.distribute(ours, optimizer, codec="none")
    for step in range(5):
        for model, each in ((plain, reference), (ours, optimizer)):
            each.zero_grad()
            for part in range(2):  # accumulated
                _loss(model, _batch(part, step)).backward()
            each.step()
    assert torch.equal(_flat(plain), _flat(ours))
    job.close()


def _together(codec: str) -> dict[str, Any]:
    world = laconic.init()
    model = _model(seed=world.rank)  # differs; rank 0's is what all begin with
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    job = laconic.distribute(model, optimizer, codec=codec)
    begin = _flat(model).clone()
    for step in range(6):
        optimizer.zero_grad()
        _loss(model, _batch(world.rank, step)).backward()
        optimizer.step()
        scheduler.step()
    saved = optimizer.state_dict()
    again = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    found = {
        "begin": begin,
        "end": _flat(model).clone(),
        "nbytes": sum(r.sent_nbytes for r in job.state.records if r.step == 5),
        "residuals": {name: value.clone() for name, value in saved["laconic"]["residuals"].items()},
        "step": saved["laconic"]["step"],
    }
    job.close()
    job = laconic.distribute(model, again, codec=codec)
    again.load_state_dict(saved)
    found["restored"] = job.state.state_dict()
    world.close()
    return found


@pytest.mark.processes
@pytest.mark.parametrize("codec", ["none", "dynamic8", "topk(0.1)+qsgd(4)"])
def test_workers_stay_alike(codec: str) -> None:
    results = run_local(3, _together, (codec,), timeout_s=100)
    for found in results:
        assert torch.equal(found["begin"], results[0]["begin"])
        assert torch.equal(found["end"], results[0]["end"])
        assert found["step"] == found["restored"]["step"] == 6
        assert found["nbytes"] > 0
        for name, value in found["residuals"].items():
            assert torch.equal(found["restored"]["residuals"][name], value)
    assert bool(results[0]["residuals"]) == (codec != "none")
    if codec == "none":
        model = _model(seed=0)
        optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
        for step in range(6):
            optimizer.zero_grad()
            for rank in range(3):
                (_loss(model, _batch(rank, step)) / 3).backward()
            optimizer.step()
            scheduler.step()
        torch.testing.assert_close(results[0]["end"], _flat(model), rtol=1e-4, atol=1e-5)


def _unused() -> list[bool]:
    """A parameter that only some ranks use gets the mean all the same."""
    world = laconic.init()
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    laconic.distribute(model, optimizer, codec="none")
    before = _flat(model).clone()
    model[world.rank % 2](torch.ones(1, 4)).sum().backward()
    optimizer.step()
    ends = laconic.all_gather(_flat(model), algorithm="ring")
    world.close()
    return [torch.equal(ends[0], ends[1]), bool((ends[0] != before).all())]


@pytest.mark.processes
def test_parameters_that_only_some_ranks_use() -> None:
    assert run_local(2, _unused, timeout_s=60) == [[True, True]] * 2


def test_parameters_that_are_added_are_the_models() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = laconic.distribute(model, optimizer, codec="none")
    optimizer.add_param_group({"params": nn.Linear(2, 2).parameters()})
    _loss(model, _batch(0, 0)).backward()
    with pytest.raises(BadInput, match="the optimiser trains 2 parameters that are not the model's"):
        optimizer.step()
    job.close()


def test_parameters_of_several_dtypes() -> None:
    model = nn.ModuleList([nn.Linear(40, 40), nn.Linear(40, 40).double()])
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = laconic.distribute(model, optimizer, codec="none")
    (model[0](torch.ones(40)).sum() + model[1](torch.ones(40).double()).sum()).backward()
    optimizer.step()
    job.close()


def test_wrong_use() -> None:
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(UnknownName, match="sync"):
        laconic.distribute(model, optimizer, consistency="sink", codec="none")
    with pytest.raises(BadInput, match="not the model's"):
        laconic.distribute(nn.Linear(2, 2), optimizer)
    with pytest.raises(UnknownName, match="unknown option of distribute 'algoritm'; did you mean 'algorithm'"):
        laconic.distribute(model, optimizer, algoritm="ring")
    job = laconic.distribute(model, optimizer)
    with pytest.raises(BadInput, match="already"):
        laconic.distribute(model, optimizer)
    job.close()
