"""A peer lost while buckets are under way, and loops that come too late: typed, in time, nothing half done."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import laconic
from laconic.errors import BadInput, LaconicError
from laconic.transports.faults import Choice, Faulty
from laconic.transports.launcher import LocalJob, run_local

TIMEOUT_S = 4.0
BEGUN = 4  # by this step everything overlaps


def _setup(
    timeout_s: float = TIMEOUT_S, corrupt: Choice | None = None
) -> tuple[Any, nn.Module, torch.optim.Optimizer, Any]:
    torch.set_num_threads(1)
    world = laconic.init(timeout_s=timeout_s)
    if corrupt is not None:
        world.transport = Faulty(world.transport, corrupt=corrupt)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 300), nn.ReLU(), nn.Linear(300, 300), nn.ReLU(), nn.Linear(300, 5))
    optimizer = torch.optim.SGD(model.parameters(), 0.05, momentum=0.9)
    job = laconic.distribute(model, optimizer, codec="dynamic8", message_nbytes=1 << 14)
    return world, model, optimizer, job


def _step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    optimizer.zero_grad()
    model(torch.randn(8, 20)).square().mean().backward()
    optimizer.step()


def _until_lost(how: str) -> dict[str, Any]:
    corrupting: list[bool] = []
    world, model, optimizer, job = _setup(corrupt=lambda _: bool(corrupting))
    for step in range(100):
        begun = time.monotonic()
        if world.rank == 1 and step == BEGUN + 2:
            if how == "corrupted":
                corrupting.append(True)
            else:
                os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
        try:
            _step(model, optimizer)
        except LaconicError as error:
            seconds = time.monotonic() - begun
            again = []
            for attempt in (lambda: model(torch.randn(8, 20)), model.state_dict, job.close):
                try:
                    attempt()
                    again.append("")
                except LaconicError as other:
                    again.append(type(other).__name__)
            world.close()
            return {"kind": type(error).__name__, "text": str(error), "seconds": seconds, "again": again}
    return {"kind": "nothing"}


@pytest.mark.processes
@pytest.mark.parametrize("how", ["killed", "stopped", "corrupted"])
def test_a_lost_peer_is_told_in_the_next_forward_or_step(how: str) -> None:
    job = LocalJob(3, _until_lost, (how,))
    try:
        found = [outcome.value for outcome in job.outcomes(90.0, (0, 2))]
    finally:
        job.kill()
    kinds = ["PeerLost", "CollectiveTimeout"]
    if how == "corrupted":
        kinds.append("PayloadError")
        assert any("peer 1 sent a bad payload" in each["text"] for each in found)
    for each in found:
        assert each["kind"] in kinds, each
        assert each["seconds"] < 6 * TIMEOUT_S
        assert "rank" in each["text"]
        assert all(each["again"]), "half-updated weights must not be had without a word"


def _refused(what: str) -> dict[str, Any]:
    world, model, optimizer, job = _setup(30.0)
    for _ in range(BEGUN):
        _step(model, optimizer)
    job.finish()
    optimizer.zero_grad()
    before = [p.detach().clone() for p in model.parameters()]
    taken = list(model.parameters())
    try:
        if what == "backward twice":
            for _ in range(2):
                model(torch.randn(8, 20)).square().mean().backward()
        elif what == "left out":
            for _ in range(2):
                optimizer.zero_grad()
                model(torch.randn(8, 20)).square().mean().backward()
        elif what == "saved in between":
            model(torch.randn(8, 20)).square().mean().backward()
            optimizer.state_dict()
        elif what == "weights changed":
            _step(model, optimizer)
            with torch.no_grad():
                taken[2].clamp_(-0.01, 0.01)
            model(torch.randn(8, 20))
        elif what == "kept":
            _step(model, optimizer)
            model(torch.randn(8, 20)).square().mean().backward()
        elif what == "changed":
            model(torch.randn(8, 20)).square().mean().backward()
            for parameter in taken:
                parameter.grad.mul_(0.5)  # type: ignore[union-attr]
        else:
            _step(model, optimizer)
            optimizer.zero_grad()
            nn.functional.linear(torch.ones(1, 300), taken[2], taken[3]).sum().backward()
        optimizer.step()
        text = ""
    except BadInput as error:
        text = str(error)
    unchanged = all(torch.equal(a, b) for a, b in zip(before, taken, strict=True))
    with contextlib.suppress(LaconicError):
        job.close()
    world.close()
    return {"text": text, "unchanged": unchanged}


_SENTENCES = {
    "backward twice": "backward added to gradients that were already sent",
    "changed": "gradients were changed between backward, which sent them, and step()",
    "left out": "no step may be left out",
    "saved in between": "save before backward, or after step()",
    "weights changed": "were changed before their update had come",
    "kept": "gradients were not set to None since the last step",
    "used apart": "used otherwise than through their modules",
}


@pytest.mark.processes
@pytest.mark.parametrize("what", _SENTENCES)
def test_what_came_too_late_is_refused(what: str) -> None:
    for each in run_local(2, _refused, (what,), timeout_s=100):
        assert _SENTENCES[what] in each["text"]
        assert "overlap=False" in each["text"] or what == "saved in between"
        assert each["unchanged"] or what in ("used apart", "weights changed", "kept")


def _other_calls() -> list[float]:
    """Collectives of the user's own between steps, while the exchange is under way."""
    world, model, optimizer, job = _setup(30.0)
    found = []
    for step in range(8):
        _step(model, optimizer)
        found.append(laconic.all_reduce(torch.full((3,), float(step)), algorithm="ring").sum().item())
    job.close()
    world.close()
    return found


@pytest.mark.processes
def test_other_collectives_wait_for_what_is_under_way() -> None:
    assert run_local(2, _other_calls, (), timeout_s=100) == [[6.0 * step for step in range(8)]] * 2


def _two_jobs() -> list[float]:
    """Two models, each with a job of its own, on one world, as in adversarial training; closed one after the other."""
    world, first, one, job = _setup(30.0)
    torch.manual_seed(1)
    second = nn.Linear(20, 300)
    other = torch.optim.Adam(second.parameters(), 0.01)
    found = []
    with laconic.distribute(second, other, codec="dynamic8"):
        for step in range(8):
            _step(first, one)
            _step(second, other)
            found.append(laconic.all_reduce(torch.full((3,), float(step)), algorithm="ring").sum().item())
            if step == 5:
                job.close()
                one = torch.optim.SGD(first.parameters(), 0.05)
    world.close()
    return found


@pytest.mark.processes
def test_two_jobs_share_a_world() -> None:
    assert run_local(2, _two_jobs, (), timeout_s=100) == [[6.0 * step for step in range(8)]] * 2


def _save(model: nn.Module, saved: list[dict[str, torch.Tensor]]) -> None:
    saved.append({name: value.clone() for name, value in model.state_dict().items()})


def _another_thread() -> bool:
    """A thread of the user's own saves the model after every step: it gets whole steps."""
    world, model, optimizer, job = _setup(30.0)
    good = True
    for _ in range(8):
        _step(model, optimizer)
        saved: list[dict[str, torch.Tensor]] = []
        thread = threading.Thread(target=_save, args=(model, saved))
        thread.start()
        thread.join()
        good = good and all(torch.equal(saved[0][name], value) for name, value in model.state_dict().items())
    job.close()
    world.close()
    return good


@pytest.mark.processes
def test_other_threads_get_whole_steps() -> None:
    assert run_local(2, _another_thread, (), timeout_s=100) == [True, True]


def _leave() -> bool:
    """Rank 1 leaves at once after its last step; rank 0 saves the model first."""
    world, model, optimizer, _ = _setup(10.0)
    for _ in range(6):
        _step(model, optimizer)
    if world.rank == 0:
        time.sleep(1.0)
        model.state_dict()
    world.close()
    return True


@pytest.mark.processes
def test_who_leaves_first_sends_what_is_under_way() -> None:
    assert run_local(2, _leave, (), timeout_s=60) == [True, True]


def _foreign(make: str) -> str:
    world, model, _, job = _setup(30.0)
    job.close()
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "own optimiser": lambda p: _Own(p, 0.1), "step hook": lambda p: torch.optim.SGD(p, 0.1),
    }  # fmt: skip
    optimizer = kinds[make](model.parameters())
    if make == "step hook":
        optimizer.register_step_pre_hook(lambda *_: None)
    job = laconic.distribute(model, optimizer, codec="none")
    for _ in range(BEGUN):
        _step(model, optimizer)
    text = job.explain()
    job.close()
    world.close()
    return text


class _Own(torch.optim.SGD):
    pass


@pytest.mark.processes
@pytest.mark.parametrize("make", ["own optimiser", "step hook"])
def test_what_cannot_wait_is_taken_in_step_and_explained(make: str) -> None:
    reason = {"own optimiser": "_Own is not known to treat every parameter by itself", "step hook": "other step hooks"}
    for text in run_local(2, _foreign, (make,), timeout_s=100):
        assert "is waited for in step():" in text
        assert reason[make] in text
