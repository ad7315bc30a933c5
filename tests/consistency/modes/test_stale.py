"""Stale-synchronous training: the bound holds at every step, whoever is slow, and a broken bound raises."""

from __future__ import annotations

import copy
import random
import time
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.consistency.servers.clocks import Clocks, check_read
from laconic.errors import StalenessError
from laconic.exchange.collectives import barrier
from laconic.transports.base import Transport
from laconic.transports.launcher import run_local
from laconic.transports.threads import run_threads
from laconic.transports.world import World
from tests.reference.downpour import stale_steps


def _simulate(workers: int, bound: int, steps: int, seed: int) -> tuple[list[tuple[int, int]], int]:
    """Run the production clock table under random speeds, stragglers and a death; returns what happened, in order.

    A worker computes for a random time, its update arrives, and it begins anew when the table allows.
    """
    rng = random.Random(seed)
    clocks = Clocks(range(workers), bound)
    speed = [rng.choice([1.0, 1.0, 2.0, 10.0]) for _ in range(workers)]
    ready = dict.fromkeys(range(workers), 0.0)  # when its update arrives
    blocked: set[int] = set()
    history = [(worker, 1) for worker in range(workers)]
    furthest = 0
    for number in range(steps):
        worker = min(ready, key=lambda each: ready[each])
        now = ready.pop(worker)
        if number == steps // 2 and workers > 2:
            clocks.leave(worker)
            history.append((worker, -1))
        else:
            clocks.tick(worker, clocks.clocks[worker] + 1)
            history.append((worker, 0))
            blocked.add(worker)
        for each in [one for one in sorted(blocked) if clocks.may_begin(one)]:
            blocked.discard(each)
            history.append((each, 1))
            furthest = max(furthest, clocks.clocks[each] - clocks.slowest)
            pause = 50.0 if rng.random() < 0.01 else 0.0
            ready[each] = now + speed[each] * rng.expovariate(1.0) + pause
        assert ready, "everyone is blocked: a deadlock"
    return history, furthest


@pytest.mark.parametrize(("workers", "bound"), [(1, 0), (2, 0), (3, 1), (5, 4), (8, 16)])
def test_the_bound_holds_over_a_hundred_thousand_clocks(workers: int, bound: int) -> None:
    """20,000 clocks for each of five settings; the reference looks at all of them with nothing of the table."""
    history, furthest = _simulate(workers, bound, 20_000, seed=workers)
    assert sum(event == 0 for _, event in history) >= 19_999
    assert stale_steps(history, workers, bound) == []
    if workers > 1:
        assert furthest == bound  # it is used to the full
    if bound and workers > 1:
        assert stale_steps(history, workers, bound - 1) != []  # and the reference can tell


def test_a_broken_bound_raises() -> None:
    clocks = Clocks([0, 1], bound=2)
    for clock in (1, 2, 3):
        clocks.tick(0, clock)
    assert not clocks.may_begin(0)
    with pytest.raises(StalenessError, match="worker 0 computed step 4 while the slowest has taken 0: the bound is 2"):
        clocks.tick(0, 4)
    with pytest.raises(StalenessError, match="was at clock 3 and now says 1"):
        clocks.tick(0, 1)
    check_read("[rank 0/2]", 5, 3, 2)
    with pytest.raises(StalenessError, match="at clock 5, with weights of clock 2, the bound is 2"):
        check_read("[rank 0/2]", 5, 2, 2)
    clocks.pause(1)
    assert clocks.may_begin(0)
    clocks.resume()
    assert clocks.clocks == {0: 3, 1: 3}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 2))


def _flat(model: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _batch(rank: int, step: int) -> torch.Tensor:
    return torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))


def _train(spec: str, steps: int, slow_s: float) -> dict[str, Any]:
    world = laconic.init(timeout_s=30)
    model = _model()
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.5 if spec.endswith("false)") else 0.0)
    agreement = laconic.distribute(model, optimizer, consistency=spec, codec="none")
    ahead, bits = [], []
    for step in range(steps):
        optimizer.zero_grad()
        model(_batch(world.rank, step)).square().mean().backward()
        if world.rank == 1:
            time.sleep(slow_s)
        optimizer.step()
        slowest = agreement.clocks.slowest if hasattr(agreement, "clocks") else agreement.served.client.slowest
        ahead.append(agreement.clock - slowest)
        bits.append(_flat(model).clone())
    staleness = [record.staleness for record in agreement.records]
    agreement.finish()
    found = {"ahead": ahead, "bits": bits, "end": _flat(model).clone(), "staleness": staleness}
    agreement.close()
    world.close()
    return found


def _all(jobs: list[tuple[str, int, float]]) -> list[dict[str, Any]]:
    return [_train(*job) for job in jobs]


JOBS = [
    ("stale(2)", 30, 0.02),
    ("stale(2, central=false)", 30, 0.02),
    ("stale(0)", 6, 0.0),
    ("stale(0, central=false)", 6, 0.0),
]


@pytest.fixture(scope="module")
def ranks() -> list[list[dict[str, Any]]]:
    return run_local(3, _all, (JOBS,), timeout_s=100)


@pytest.mark.processes
@pytest.mark.parametrize("job", [0, 1])
def test_fast_workers_run_ahead_of_a_slow_one_by_the_bound(job: int, ranks: list[list[dict[str, Any]]]) -> None:
    found = [rank[job] for rank in ranks]
    for rank in found:
        assert max(rank["ahead"]) <= 2
        assert torch.equal(rank["end"], found[0]["end"])
    assert max(max(rank["ahead"]) for rank in found) == 2
    assert max(max(rank["staleness"]) for rank in found) > 0


@pytest.mark.processes
def test_bound_zero_is_synchronous(ranks: list[list[dict[str, Any]]]) -> None:
    """By servers up to the order of additions, and among peers to the bit on all workers."""
    reference = {}
    for momentum in (0.0, 0.5):
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=momentum)
        for step in range(6):
            optimizer.zero_grad()
            for rank in range(3):
                (model(_batch(rank, step)).square().mean() / 3).backward()
            optimizer.step()
        reference[momentum] = _flat(model)
    central, decentral = ([rank[job] for rank in ranks] for job in (2, 3))
    for rank in range(3):
        assert max(central[rank]["ahead"]) == max(decentral[rank]["ahead"]) == 0
        torch.testing.assert_close(central[rank]["end"], reference[0.0], rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(decentral[rank]["end"], reference[0.5], rtol=1e-5, atol=1e-6)
        for ours, first in zip(decentral[rank]["bits"], decentral[0]["bits"], strict=True):
            assert torch.equal(ours, first)


class _Counter(nn.Module):
    """Its one weight goes down by 1/P of whatever gradient it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))


def _counting(world: World, bound: int) -> Any:
    model = _Counter()
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    spec = f"stale({bound}, central=false)"
    return laconic.distribute(model, optimizer, consistency=spec, codec="none", world=world)


def _step(job: Any, gradient: float) -> None:
    job.model.w.grad = torch.tensor([gradient])
    job.optimizer.step()


def _resume_behind(transport: Transport) -> float:
    """Rank 0 saves its first step with rank 1's second gradient in it, which rank 1 then computes again."""
    world = World(transport)
    job = _counting(world, bound=1)
    while world.rank == 0 and not job._early:  # rank 1 has sent both
        assert job._take_in(job._mesh, 10.0)
    _step(job, 0.0)
    saved = copy.deepcopy((job.model.state_dict(), job.optimizer.state_dict()))
    _step(job, 2.0 * world.rank)
    barrier(group=world)
    job.close()
    job = _counting(world, bound=1)
    job.model.load_state_dict(saved[0])
    job.optimizer.load_state_dict(saved[1])
    for gradient in (2.0, 0.0):  # the second step once more, and one by whose end all of it has come
        _step(job, gradient * world.rank)
    barrier(group=world)
    found = float(job.model.w.detach())
    job.close()
    return found


def test_a_gradient_that_a_checkpoint_holds_is_not_counted_again() -> None:
    assert run_threads(2, _resume_behind) == [-1.0, -1.0]


def _finish_apart(transport: Transport) -> float:
    """Rank 1 takes two steps more than rank 0 before `finish`; then both go on."""
    world = World(transport)
    job = _counting(world, bound=0)
    for _ in range(1 + 2 * world.rank):
        _step(job, 0.0)
    job.finish()
    _step(job, 1.0)
    job.finish()
    found = float(job.model.w.detach())
    job.close()
    return found


def test_workers_that_took_unlike_numbers_of_steps_go_on_together_after_finish() -> None:
    assert run_threads(2, _finish_apart, timeout_s=10) == [-1.0, -1.0]
