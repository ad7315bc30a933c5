"""Asynchronous modes without one of their workers: killed, frozen and woken, or all at once.

One job of three processes trains by all modes in turn, so that starting them and losing one is paid once.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import laconic
from laconic.consistency.agreed_losses import AgreedLosses
from laconic.errors import PeerLost
from laconic.transports.launcher import LocalJob

SPECS = (
    "async", "async(servers=1)", "stale(4)", "stale(4, central=false)", "easgd(period=5, asynchronous=true)",
    "gossip(ring, asynchronous=true)",
)  # fmt: skip
STEPS, TIMEOUT_S, VICTIM = 40, 15.0, 1
FROZEN_S = 8.0  # longer than the 5 s of silence that the others wait


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 1))


def _state(model: nn.Module) -> Tensor:
    return torch.cat([value.double().reshape(-1) for value in model.state_dict().values()])


def _one_step(job: Any, model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    draw = torch.Generator().manual_seed(100 * step + job.world.rank)
    optimizer.zero_grad()
    model(torch.randn(8, 6, generator=draw) + job.world.rank).square().mean().backward()
    optimizer.step()


def _lose(engine: str, how: int) -> dict[str, Any]:
    """Train by all modes; the victim sends itself a signal in the middle. What each mode ended with, or its error."""
    world = laconic.init(engine, timeout_s=TIMEOUT_S)
    jobs: dict[str, Any] = {}
    for spec in SPECS:
        model = _model()
        optimizer = torch.optim.SGD(model.parameters(), 0.01)
        jobs[spec] = (laconic.distribute(model, optimizer, consistency=spec, codec="none"), model, optimizer)
    found: dict[str, Any] = {}

    def attempt(spec: str, work: Any, *args: Any) -> None:
        try:
            work(*args)
        except PeerLost as error:
            found[spec] = {"error": str(error), "peer": error.peer}

    for step in range(STEPS):
        for spec, each in jobs.items():
            if spec not in found and not (spec == "async(servers=1)" and world.rank == 2):
                attempt(spec, _one_step, *each, step)
        if world.rank == VICTIM and step == STEPS // 4:
            os.kill(os.getpid(), how)
        time.sleep(0.01)
    for spec, (job, _, _) in jobs.items():
        if spec not in found:
            attempt(spec, job.finish)
    for spec, (job, model, _) in jobs.items():
        found.setdefault(spec, {"state": _state(model), "lost": job.lost_ranks, "told": job.explain()})
        job.close()
    world.close()
    return found


def _is_stopped(process: Any) -> bool:
    return Path(f"/proc/{process.pid}/stat").read_text().rsplit(")", 1)[1].split()[0] == "T"


def _until(condition: Any, what: str) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.02)


@pytest.mark.alone  # a starved rank would be given up, too
@pytest.mark.processes
@pytest.mark.parametrize("engine", ["gloo", "zmq"])
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_the_others_go_on_without_a_worker_and_a_woken_one_is_told(engine: str, how: int) -> None:
    job = LocalJob(3, _lose, (engine, int(how)))
    if how == signal.SIGSTOP:
        _until(lambda: _is_stopped(job.processes[VICTIM]), "the victim never trained")
        time.sleep(FROZEN_S)
        os.kill(job.processes[VICTIM].pid, signal.SIGCONT)
    outcomes = job.outcomes(80, [0, 2] if how == signal.SIGKILL else None)
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error or outcome.exitcode
    found = {outcome.rank: outcome.value for outcome in outcomes}
    for spec in SPECS:
        first, other = found[0][spec], found[2][spec]
        assert "error" not in first, f"{spec}: {first['error']}"
        assert "error" not in other, f"{spec}: {other['error']}"
        assert first["lost"] == other["lost"] == [VICTIM], spec
        assert "went on without ranks [1]" in first["told"]
        assert torch.equal(first["state"], other["state"]), f"{spec}: weights and buffers differ"
        assert torch.isfinite(first["state"]).all()
        if how == signal.SIGSTOP:
            woken = found[VICTIM][spec]
            assert "others gave it up" in woken.get("error", ""), f"{spec}: the woken worker was not told"
            assert woken["peer"] == VICTIM


def _all_die() -> str:
    world = laconic.init(timeout_s=TIMEOUT_S)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    job = laconic.distribute(model, optimizer, consistency="async(servers=1)")
    for step in range(40 if world.rank < 2 else 0):
        optimizer.zero_grad()
        model(torch.ones(1, 4)).square().mean().backward()
        optimizer.step()
        if step == 20:
            os.kill(os.getpid(), signal.SIGKILL)
    try:
        job.finish()
    except PeerLost as error:
        return str(error)
    return "finished"


@pytest.mark.alone  # a starved rank would be given up, too
@pytest.mark.processes
def test_a_server_whose_workers_were_all_lost_does_not_finish() -> None:
    (outcome,) = LocalJob(3, _all_die).outcomes(60, [2])
    assert "all workers (rank 0, 1) were lost before they had finished" in str(outcome.value or outcome.error)


def _with_two_servers(folder: str) -> dict[str, Any]:
    """Two workers, two ranks that serve, of which the test stops the last until the others have finished."""
    world = laconic.init(timeout_s=TIMEOUT_S)
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), 0.0005)
    job = laconic.distribute(model, optimizer, consistency="async(servers=2, replicas=1)", codec="none")
    counter, last = Path(folder, f"steps-{world.rank}"), Path(folder, "stopped")
    step = 0
    while world.rank < 2 and not (last.exists() and step > 100):
        optimizer.zero_grad()
        (model(torch.ones(1, 4)) - 3).square().mean().backward()
        optimizer.step()
        step += 1
        counter.write_text(str(step))
        time.sleep(0.005)
    try:
        job.finish()
        found: dict[str, Any] = {"w": model.weight.detach().clone(), "lost": job.lost_ranks}
    except PeerLost as error:
        found = {"error": str(error)}
    counter.with_suffix(".done").touch()
    job.close()
    world.close()
    return found


@pytest.mark.alone  # a starved rank would be given up, too
@pytest.mark.processes
def test_a_server_that_was_replaced_never_reports_success(tmp_path: Path) -> None:
    job = LocalJob(4, _with_two_servers, (str(tmp_path),))
    _until(lambda: (tmp_path / "steps-0").exists(), "nobody trained")
    os.kill(job.processes[3].pid, signal.SIGSTOP)
    (tmp_path / "stopped").touch()
    done = [tmp_path / f"steps-{rank}.done" for rank in (0, 1, 2)]
    _until(lambda: all(each.exists() for each in done), "the others did not finish")
    os.kill(job.processes[3].pid, signal.SIGCONT)
    found = [outcome.value for outcome in job.outcomes(60)]
    assert "others gave it up" in found[3]["error"]
    for each in found[:3]:
        assert each["lost"] == [3]
        assert torch.equal(each["w"], found[0]["w"])


COUNTED = 120


def _count(folder: str) -> dict[str, Any]:
    """Each push adds 1 to every weight, so that the weights tell how many updates were applied."""
    world = laconic.init(timeout_s=TIMEOUT_S)
    model = nn.Linear(40, 1, bias=False)
    nn.init.zeros_(model.weight)
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    job = laconic.distribute(model, optimizer, consistency="async(staleness_aware=false)", codec="none")
    for step in range(COUNTED):
        model.weight.grad = torch.full((1, 40), -1.0)
        optimizer.step()
        Path(folder, f"{world.rank}.{step + 1}").touch()
        time.sleep(0.01)
    job.finish()
    found = {"w": model.weight.detach().clone(), "lost": job.lost_ranks}
    job.close()
    world.close()
    return found


@pytest.mark.alone  # a starved rank would be given up, too
@pytest.mark.processes
def test_a_shard_outlives_its_server_and_then_the_one_that_took_over(tmp_path: Path) -> None:
    job = LocalJob(4, _count, (str(tmp_path),))
    for victim, at in ((1, 20), (2, 60)):  # shard 1 goes from rank 1 to rank 2, and then to rank 3
        _until(lambda at=at: (tmp_path / f"0.{at}").exists(), "nobody trained")
        job.processes[victim].kill()
    outcomes = job.outcomes(60, [0, 3])
    answered = 2 * COUNTED + sum(max(int(p.suffix[1:]) for p in tmp_path.glob(f"{rank}.*")) for rank in (1, 2))
    for outcome in outcomes:
        assert outcome.value is not None, outcome.error
        assert outcome.value["lost"] == [1, 2]
        assert torch.equal(outcome.value["w"], outcomes[0].value["w"])
    # at most the push that was under way when each worker died may be there besides
    assert answered <= float(outcomes[0].value["w"].min())
    assert float(outcomes[0].value["w"].max()) <= answered + 2


def test_without_a_store_nobody_goes_on_without_a_rank() -> None:
    world: Any = SimpleNamespace(rank=0, world_size=2, engine="mpi", new_store=lambda name: None)
    with pytest.raises(PeerLost, match=r"\[rank 0/2\] async: rank 1 is lost, and engine 'mpi' has no store"):
        AgreedLosses(world, "async").give_up(1)
