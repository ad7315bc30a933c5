"""What is loaded fits, or nothing is: every mode refuses a state with any tensor changed, or another rank's."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency import get, names
from laconic.errors import BadInput
from laconic.storage.tree import dumps
from laconic.transports.launcher import run_local

SPECS = [spec for name in names() for spec in get(name).examples]
OPTIONAL = {"warm", "arrived", "accrued", "left_out", "updates", "velocity"}  # what a state may lack


def _tensors(tree: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of every tensor but those of an optimiser, which torch checks itself."""
    if isinstance(tree, Tensor):
        yield path
    elif isinstance(tree, dict):
        for key, value in tree.items():
            if key != "optimizer":
                yield from _tensors(value, (*path, key))


def _changed(state: Any, path: tuple[Any, ...], change: Any) -> Any:
    state = copy.deepcopy(state)
    place = state
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = change(place[path[-1]])
    return state


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    return bool(one == other)


def _accepted(job: Any, states: dict[str, Any]) -> list[str]:
    """The names of those of `states` that the optimiser loads, or that change something though they are refused."""
    found = []
    for name, state in states.items():
        before = copy.deepcopy(job.state_dict())
        try:
            job.optimizer.load_state_dict({**job.optimizer.state_dict(), "laconic": state})
            found.append(name)
        except BadInput:
            if not _same(before, job.state_dict()):
                found.append(f"{name} half")
    return found


def _at_rest(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """The job's state once nothing of asynchronous workers is on its way any more, which would change it by itself."""
    before, saved = None, optimizer.state_dict()["laconic"]
    while before is None or dumps(before) != dumps(saved):
        time.sleep(0.3)
        before, saved = saved, optimizer.state_dict()["laconic"]
    return saved


def _one(spec: str) -> dict[str, Any]:
    with laconic.init(timeout_s=60) as world:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(40, 48), nn.ReLU(), nn.Linear(48, 10))
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5)
        codec = "none" if get(spec.partition("(")[0])().no_codec or "drop" in spec else "topk(0.1)"
        job = laconic.distribute(model, optimizer, consistency=spec, codec=codec)
        x, y = torch.randn(16, 40), torch.randint(10, (16,))
        for _ in range(3):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x), y).backward()
            optimizer.step()
        laconic.barrier()
        saved = _at_rest(optimizer)
        paths = list(_tensors(saved))
        wrong = {"not a state": {}, "not whose": {k: v for k, v in saved.items() if k != "owner"}}
        for path in paths:
            name = ".".join(map(str, path))
            wrong[f"{name} longer"] = _changed(saved, path, lambda t: torch.cat([t, t[:1]]))
            wrong[f"{name} double"] = _changed(saved, path, Tensor.double)
            wrong[f"{name} text"] = _changed(saved, path, lambda t: "a text")
        for key in saved.keys() - OPTIONAL - {"owner"}:
            wrong[f"no {key}"] = {k: v for k, v in saved.items() if k != key}
        if paths:
            wrong["another rank's"] = {**saved, "owner": {**saved["owner"], "rank": 1 - world.rank}}
            wrong["another world's"] = {**saved, "owner": {**saved["owner"], "world_size": 3}}
            wrong["cut"] = {**saved, "owner": {**saved["owner"], "tensors": len(paths) + 1000}}
        accepted = _accepted(job, wrong)
        optimizer.load_state_dict({**optimizer.state_dict(), "laconic": saved})
        laconic.barrier()
        job.finish()
        job.close()
        return {"tensors": len(paths), "accepted": accepted}


def _all(specs: list[str]) -> dict[str, Any]:
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for spec in specs:
        try:
            found[spec] = _one(spec)
        except Exception as error:
            found[spec] = {"error": f"{type(error).__name__}: {error}"}
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local(2, _all, (SPECS,), timeout_s=100)


@pytest.mark.processes
@pytest.mark.parametrize("spec", SPECS)
def test_a_mode_loads_a_state_that_fits_or_nothing(spec: str, ranks: list[dict[str, Any]]) -> None:
    for rank, found in enumerate(each[spec] for each in ranks):
        assert "error" not in found, f"rank {rank}: {found['error']}"
        assert found["accepted"] == []
    assert any(each["local(8)"]["tensors"] for each in ranks)


def _without_the_jobs_part() -> list[str]:
    world = laconic.init()
    model = nn.Linear(40, 40)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = laconic.distribute(model, optimizer, codec="topk(0.1)")
    told = []
    for with_job in (False, True):
        state, own = optimizer.state_dict(), job.state_dict()
        state.pop("laconic")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.load_state_dict(state)
            if with_job:
                job.load_state_dict(own)
            for _ in range(2):
                model(torch.ones(1, 40)).sum().backward()
                optimizer.step()
        told.append("; ".join(str(each.message) for each in caught))
    state = optimizer.state_dict()
    job.close()
    for order in ("before", "after"):
        resumed = torch.optim.SGD(model.parameters(), 0.1)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            if order == "before":
                resumed.load_state_dict(state)
            job = laconic.distribute(model, resumed, codec="topk(0.1)")
            if order == "after":
                resumed.load_state_dict(state)
            for _ in range(2):
                model(torch.ones(1, 40)).sum().backward()
                resumed.step()
        told.append("; ".join(str(each.message) for each in caught))
        assert "laconic" not in resumed.param_groups[0]
        job.close()
    world.close()
    return told


@pytest.mark.processes
def test_an_optimiser_loaded_without_the_jobs_state_is_noticed_once() -> None:
    for rank, (without, beside, before, after) in enumerate(run_local(2, _without_the_jobs_part, timeout_s=60)):
        assert without.count("has no 'laconic'") == 1
        assert f"[rank {rank}/2]" in without
        assert beside == ""
        assert before.count("the optimiser was loaded before distribute()") == 1
        assert after == ""
