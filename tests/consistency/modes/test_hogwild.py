"""Hogwild on real processes: one memory, no update lost where none collide, staleness counted, nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.consistency.modes import hogwild
from laconic.errors import BadInput
from laconic.transports.launcher import run_local
from laconic.transports.world import World

ROWS, WIDTH, STEPS = 300, 4, 200
LEFT = ROWS - 20  # rows that nobody touches


def _maps() -> bool:
    return "laconic-hogwild" in Path("/proc/self/maps").read_text()


def _files() -> bool:
    return any("laconic-hogwild" in os.readlink(f"/proc/self/fd/{number}") for number in _open_files())


def _open_files() -> list[str]:
    return [name for name in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{name}")]


def _sparse(world: World, make: Any, shared_rows: bool) -> dict[str, Any]:
    """Each worker trains rows of its own, or all the same ones, of one embedding; the loss's gradient is 1 a row."""
    torch.manual_seed(world.rank)
    model = nn.Embedding(ROWS, WIDTH, sparse=True)
    optimizer = make(model.parameters(), 0.5)
    agreement: Any = laconic.distribute(model, optimizer, consistency="hogwild", world=world)
    begun = model.weight.detach().clone()
    laconic.barrier(group=world)
    expected = begun.clone()
    for step in range(STEPS):
        place = step * 7 % (LEFT // 2)
        row = place if shared_rows else 2 * place + world.rank
        optimizer.zero_grad()
        model(torch.tensor([row])).sum().backward()
        optimizer.step()
        expected[row] -= 0.5
    mine = torch.arange(world.rank, LEFT, 2)
    agreement.finish()
    found = {
        "mine": torch.equal(model.weight[mine], expected[mine]),
        "left": torch.equal(model.weight[LEFT:], begun[LEFT:]),
        "finite": bool(torch.isfinite(model.weight).all()),
        "moved": float((model.weight - begun).detach().abs().sum()),
        "updates": agreement.updates,
        "mapped": _maps(),
    }
    laconic.barrier(group=world)
    agreement.close()
    with torch.no_grad():
        model.weight.fill_(world.rank)
    laconic.barrier(group=world)
    return {**found, "still": _maps() or _files(), "own": bool((model.weight == world.rank).all())}


def _in_turn(world: World) -> list[int | None]:
    """Rank 0 steps three times while rank 1 holds its gradient."""
    model = nn.Linear(8, 8)
    optimizer = torch.optim.Adam(model.parameters(), 0.1)
    agreement = laconic.distribute(model, optimizer, consistency="hogwild", world=world)
    for _turn in range(2):
        for _ in range(3 if world.rank == 0 else 1):
            optimizer.zero_grad()
            model(torch.ones(8)).sum().backward()
            if world.rank == 1:
                laconic.barrier(group=world)
            optimizer.step()
        if world.rank == 0:
            laconic.barrier(group=world)
        laconic.barrier(group=world)
    agreement.finish()
    agreement.close()
    return [record.staleness for record in agreement.records]


def _elsewhere(world: World) -> str:
    """Rank 1 is on another host: it finds other processes there."""
    if world.rank == 1:
        hogwild.PROCESSES = "/nowhere"
    model = nn.Linear(8, 8)
    try:
        laconic.distribute(model, torch.optim.SGD(model.parameters(), 0.1), consistency="hogwild", world=world)
    except BadInput as error:
        return str(error)
    finally:
        hogwild.PROCESSES = "/proc"
    return ""


def _all() -> dict[str, Any]:
    with laconic.init(timeout_s=60) as world:
        return {
            "apart": _sparse(world, torch.optim.SGD, shared_rows=False),
            "shared": _sparse(world, torch.optim.SGD, shared_rows=True),
            "adam": _sparse(world, torch.optim.SparseAdam, shared_rows=True),
            "turns": _in_turn(world),
            "elsewhere": _elsewhere(world),
        }


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_local(2, _all, timeout_s=110)


@pytest.mark.processes
def test_sparse_updates_of_different_rows_are_all_there(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert each["apart"]["mine"], "an update of this worker's rows was lost, or another wrote them"
        assert each["apart"]["left"], "rows that nobody touched were written"
        assert each["apart"]["updates"] == [STEPS, STEPS]


@pytest.mark.processes
def test_sparse_updates_of_the_same_rows_train(ranks: list[dict[str, Any]]) -> None:
    whole = 2 * STEPS * WIDTH * 0.5  # every update of both workers
    for each in (rank["shared"] for rank in ranks):
        assert each["finite"]
        assert each["left"]
        assert 0.95 * whole < each["moved"] < 1.001 * whole
    assert all(rank["adam"]["finite"] and rank["adam"]["left"] and rank["adam"]["moved"] > 0 for rank in ranks)


@pytest.mark.processes
def test_staleness_is_the_updates_of_others_in_between(ranks: list[dict[str, Any]]) -> None:
    assert ranks[1]["turns"] == [3, 3]
    assert ranks[0]["turns"][1:3] == [0, 0]
    assert ranks[0]["turns"][3] in (0, 1)  # rank 1's update came before or after rank 0 looked


@pytest.mark.processes
def test_nothing_stays_behind_and_models_part(ranks: list[dict[str, Any]]) -> None:
    for each in (rank["apart"] for rank in ranks):
        assert each["mapped"], "the weights were not in the shared memory"
        assert not each["still"], "close() left the memory mapped or its file open"
        assert each["own"], "models still share weights after close()"


@pytest.mark.processes
def test_other_hosts_get_one_sentence_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for each in ranks:
        assert "all workers must be on one host: rank 1 cannot open rank 0's" in each["elsewhere"]


def test_wrong_use() -> None:
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    with pytest.raises(BadInput, match="sends nothing"):
        laconic.distribute(model, optimizer, consistency="hogwild", codec="dynamic8")
    with pytest.raises(BadInput, match="no option algorithm"):
        laconic.distribute(model, optimizer, consistency="hogwild", algorithm="ring", codec="none")
