"""Gossip: mixing matrices, the predicted rate of the implementation itself, D-PSGD's formula, codecs, and pairs."""

from __future__ import annotations

import copy
import itertools
import threading
import time
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import laconic
from laconic.consistency import build
from laconic.consistency.gossip import graphs
from laconic.consistency.gossip.pairs import PartnerChoice, _Pairs
from laconic.errors import BadInput, CollectiveTimeout, UnknownName
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from reference import averaging as reference
from tests.consistency.least_squares import ETA, gradient, start, train_all

GRAPHS = graphs.names()


@given(st.sampled_from(GRAPHS), st.integers(1, 24), st.integers(0, 50), st.integers(0, 5))
def test_mixing_is_doubly_stochastic_and_all_ranks_agree(graph: str, size: int, step: int, seed: int) -> None:
    matrix = graphs.mixing_matrix(graph, size, step, seed)
    assert (matrix >= 0).all()
    np.testing.assert_allclose(matrix.sum(axis=0), 1, atol=1e-12)
    np.testing.assert_allclose(matrix.sum(axis=1), 1, atol=1e-12)
    for rank in range(size):  # who is told, hears
        tells = graphs.neighbours(graph, size, rank, step, seed).tells
        assert tells == {peer: matrix[peer, rank] for peer in range(size) if peer != rank and matrix[peer, rank]}
        assert set(tells) <= set(graphs.acquaintances(graph, range(size), rank))


@pytest.mark.parametrize("size", [2, 3, 4, 5, 8, 13, 16])
def test_rates_are_those_of_theory(size: int) -> None:
    np.testing.assert_allclose(graphs.mixing_matrix("ring", size), reference.ring(size), atol=1e-15)
    if size > 2:
        cosines = [abs(1 / 3 + 2 / 3 * np.cos(2 * np.pi * k / size)) for k in range(1, size)]
        assert graphs.contraction("ring", size) == pytest.approx(max(cosines))
    sweep = np.eye(size)
    for step in range((size - 1).bit_length()):
        matrix = graphs.mixing_matrix("exponential", size, step)
        np.testing.assert_allclose(matrix, reference.exponential(size, step), atol=1e-15)
        sweep = matrix @ sweep
    if size & (size - 1) == 0:
        np.testing.assert_allclose(sweep, 1 / size, atol=1e-15)
    drawn = [graphs.mixing_matrix("random", size, step) for step in range(600)]
    mean_square = np.linalg.eigvalsh(np.mean([w.T @ w for w in drawn], axis=0) - 1 / size)[-1]
    assert graphs.contraction("random", size) ** 2 == pytest.approx(mean_square, abs=0.06)


def _mix(world: World, spec: str, codec: str, steps: int, numel: int = 50) -> list[np.ndarray]:
    """Gossip without gradients, from different points: this worker's weights before every step and at the end."""
    model = nn.Linear(numel, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    agreement: Any = laconic.distribute(model, optimizer, consistency=spec, codec=codec, world=world)
    agreement.weights.values.copy_(_point(world.rank, numel))
    path = []
    for _ in range(steps):
        path.append(agreement.weights.values.double().numpy().copy())
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
    path.append(agreement.weights.values.double().numpy().copy())
    agreement.finish()
    agreement.close()
    return [*path, agreement.weights.values.double().numpy().copy()]


def _point(rank: int, numel: int) -> torch.Tensor:
    return torch.randn(numel, generator=torch.Generator().manual_seed(rank))


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_the_implementation_mixes_by_the_matrix_and_at_its_rate(graph: str, size: int) -> None:
    steps = 8
    found = np.stack(run_threads(size, lambda t: _mix(World(t), f"gossip({graph}, seed=3)", "none", steps)))
    x, mean = found[:, 0], found[:, 0].mean(axis=0)
    product = np.eye(size)
    for step in range(steps):
        product = graphs.mixing_matrix(graph, size, step, 3) @ product
        np.testing.assert_allclose(found[:, step + 1], product @ x, atol=1e-5)
        second = np.linalg.svd(product - 1 / size, compute_uv=False)[0]
        assert np.linalg.norm(found[:, step + 1] - mean) <= second * np.linalg.norm(x - mean) + 1e-4
    if graph == "ring":
        assert second == pytest.approx(graphs.contraction(graph, size) ** steps, abs=1e-12)
    np.testing.assert_allclose(found[:, -1], np.broadcast_to(mean, x.shape), atol=1e-5)
    assert all(np.array_equal(each, found[0, -1]) for each in found[:, -1])  # one model after finish()


@pytest.mark.parametrize("graph", GRAPHS)
@pytest.mark.parametrize("codec", ["dynamic8", "qsgd(4)", "topk(0.1)"])
def test_compressed_gossip_comes_together_and_keeps_the_mean(graph: str, codec: str) -> None:
    found = np.stack(run_threads(4, lambda t: _mix(World(t), f"gossip({graph})", codec, 120, 256)))
    mean = found[:, 0].mean(axis=0)
    spread = np.linalg.norm(found - mean, axis=2).max(axis=0)
    assert spread[-2] < 0.02 * spread[0]
    np.testing.assert_allclose(found[:, -2].mean(axis=0), mean, atol=1e-4)


@pytest.mark.processes
def test_gossip_is_dpsgd_on_real_processes() -> None:
    matrices = {"gossip": lambda t: reference.ring(4), "gossip(exponential)": lambda t: reference.exponential(4, t)}
    ranks = run_local(4, train_all, (list(matrices), 12), timeout_s=110)
    for spec, mixing in matrices.items():
        expected = reference.dpsgd(gradient, start(), mixing, 12, ETA)
        for rank in range(4):
            np.testing.assert_allclose(ranks[rank][spec]["own"].numpy(), expected[rank], rtol=2e-5, atol=2e-5)
            np.testing.assert_allclose(ranks[rank][spec]["end"].numpy(), expected.mean(axis=0), rtol=2e-5, atol=2e-5)
            assert all(record.sent_nbytes >= 4 * 40 for record in ranks[rank][spec]["records"])


class _Stage:
    """What lets a test say who steps when."""

    def __init__(self) -> None:
        self.done = threading.Semaphore(0)


def _pairs(world: World, stage: _Stage, codec: str, steps: int, slow: int) -> dict[str, Any]:
    model = nn.Linear(20, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    spec = "gossip(random, asynchronous=true)"
    agreement: Any = laconic.distribute(model, optimizer, consistency=spec, codec=codec, world=world)
    with torch.no_grad():
        agreement.weights.values.copy_(_point(world.rank, 20))
    for step in range(steps):
        if world.rank == slow and step == 1:
            for _ in range(world.world_size - 1):
                assert stage.done.acquire(timeout=60), "the others wait for the slow one"
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        if world.rank != slow:
            agreement.pairs.rest(30.0)  # so that each step is an exchange, however fast the steps
    stage.done.release()
    own = agreement.weights.values.clone()
    agreement.finish()
    agreement.close()
    met = sum(record.staleness or 0 for record in agreement.records)
    return {"own": own, "end": agreement.weights.values.clone(), "met": met, "records": agreement.records}


def test_the_end_waits_for_a_question_that_is_still_being_made(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[_Pairs] = []
    rested: list[bool] = []
    genuine_start, genuine_one = _Pairs.start, PartnerChoice.one

    def start(pairs: _Pairs) -> None:
        made.append(pairs)
        genuine_start(pairs)

    def one(choice: PartnerChoice, left: Any, present: Any) -> int | None:
        (asking,) = {id(each): each for each in made if each.choice is choice}.values()
        try:
            asking.rest(0.0)
            rested.append(True)
        except CollectiveTimeout:
            rested.append(False)
        return genuine_one(choice, left, present)

    monkeypatch.setattr(_Pairs, "start", start)
    monkeypatch.setattr(PartnerChoice, "one", one)
    stage = _Stage()
    run_threads(3, lambda t: _pairs(World(t), stage, "dynamic8", 4, slow=1), timeout_s=90)
    assert rested
    assert not any(rested)


@pytest.mark.parametrize("codec", ["none", "dynamic8"])
def test_pairs_come_together_while_one_worker_stands_still(codec: str) -> None:
    stage = _Stage()
    found = run_threads(3, lambda t: _pairs(World(t), stage, codec, 30, slow=1), timeout_s=90)
    begun = torch.stack([_point(rank, 20) for rank in range(3)])
    for each in found:
        torch.testing.assert_close(each["end"], begun.mean(0), rtol=1e-4, atol=1e-4)
        assert torch.equal(each["end"], found[0]["end"])
    apart = (torch.stack([each["own"] for each in found]) - begun.mean(0)).norm(dim=1)
    assert max(float(apart[0]), float(apart[2])) < 0.2 * float((begun - begun.mean(0)).norm(dim=1).min())
    assert found[1]["met"] > 0  # it was averaged with while it stood still


def _resumed(world: World, older: int | None) -> dict[str, Any]:
    """Pairs before and after a restart, at which one rank may load a state that is older than the others'."""
    states: list[dict[str, Any]] = []
    for steps in (14, 10):
        model = nn.Linear(20, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        spec = "gossip(random, asynchronous=true)"
        agreement: Any = laconic.distribute(model, optimizer, consistency=spec, codec="topk(0.2)", world=world)
        if states:
            agreement.load_state_dict(states[0] if world.rank == older else states[-1])
        for step in range(steps):
            model.weight.grad = _point(100 * world.rank + step, 20).view(1, 20)
            optimizer.step()
            agreement.pairs.rest(30.0)
            if step == steps // 2:
                states.append(agreement.state_dict())
        laconic.barrier(group=world)  # nobody asks any more
        time.sleep(0.1)  # and the last answers are taken in
        states.append(agreement.state_dict())
        laconic.barrier(group=world)
        agreement.close()
    return {"before": states[1]["edges"], "after": states[-1]["edges"]}


@pytest.mark.parametrize("older", [None, 1])
def test_copies_of_edges_are_in_checkpoints_and_begin_anew_where_they_do_not_fit(older: int | None) -> None:
    found = run_threads(3, lambda t: _resumed(World(t), older), timeout_s=90)
    for i, j in itertools.permutations(range(3), 2):
        told, heard = found[i]["after"]["told"], found[j]["after"]["heard"]
        assert torch.equal(told[str(j)], heard[str(i)]), f"what {j} knows of {i} differs at both ends"
        if older not in (i, j):
            assert found[i]["after"]["tells"][str(j)] > found[i]["before"]["tells"][str(j)]


def _unmerged(world: World) -> torch.Tensor:
    """Rank 0 merges what a pair added and saves; rank 1 saves before it merges."""
    spec, saved = "gossip(random, asynchronous=true)", None
    for resumed in (False, True):
        model = nn.Linear(20, 1, bias=False)
        optimizer = torch.optim.SGD(model.parameters(), 1.0)
        agreement: Any = laconic.distribute(model, optimizer, consistency=spec, codec="none", world=world)
        if resumed:
            model.load_state_dict(saved[0])
            optimizer.load_state_dict(saved[1])
            laconic.barrier(group=world)
            agreement.finish()
            end = agreement.weights.values.clone()
        else:
            with torch.no_grad():
                agreement.weights.values.copy_(_point(world.rank, 20))
            for _ in range(2 - world.rank):
                model.weight.grad = torch.zeros_like(model.weight)
                optimizer.step()
                agreement.pairs.rest(30.0)
            laconic.barrier(group=world)  # nobody asks any more
            saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            laconic.barrier(group=world)
        agreement.close()
    return end


def test_a_checkpoint_holds_what_a_pair_added_before_the_model_has_it() -> None:
    for end in run_threads(2, lambda t: _unmerged(World(t))):
        torch.testing.assert_close(end, (_point(0, 20) + _point(1, 20)) / 2)


def _leaver(world: World) -> int:
    model = nn.Linear(20, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    agreement: Any = laconic.distribute(model, optimizer, consistency="gossip(ring, asynchronous=true)", world=world)
    for _ in range(5 if world.rank == 2 else 30):
        model.weight.grad = torch.zeros_like(model.weight)
        optimizer.step()
        agreement.pairs.rest(30.0)
    steps = agreement.step
    agreement.close()
    return int(steps)


def test_pairs_go_on_when_one_leaves() -> None:
    assert run_threads(3, lambda t: _leaver(World(t)), timeout_s=90) == [30, 30, 5]


def test_wrong_use() -> None:
    with pytest.raises(UnknownName, match="exponential, random, ring"):
        build("gossip(star)")
    with pytest.raises(BadInput, match="gamma"):
        build("gossip(ring, gamma=0)")
    model = nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for spec, options, text in [
        ("gossip", {"algorithm": "ring"}, "no option algorithm"),
        ("gossip", {"codec": "powersgd(2)"}, "matrices"),
        ("gossip(ring, asynchronous=true)", {"codec": {0: "none", 5: "dynamic8"}}, "one codec"),
    ]:
        with pytest.raises(BadInput, match=text):
            laconic.distribute(model, optimizer, consistency=spec, **({"codec": "none"} | options))


def test_what_is_wanted_while_another_is_asked_is_not_lost() -> None:
    mesh = SimpleNamespace(rank=0, world_size=2, peers=[1], send_to=lambda peer, frame: setattr(pairs, "wants", True))
    losses = SimpleNamespace(here=[0, 1], lost=set())
    choice = PartnerChoice(lambda left: [1], np.random.default_rng(0))
    pairs: Any = _Pairs(mesh, losses, torch.zeros(3), laconic.codec("none"), 0.5, choice)  # type: ignore[arg-type]
    pairs.wants = True
    pairs._ask()
    assert pairs.wants
