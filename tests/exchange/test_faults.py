"""What goes wrong in the middle of a compressed exchange surfaces typed on every rank, in time, and changes nothing."""

from __future__ import annotations

import os
import time
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.errors import CollectiveTimeout, LaconicError, PayloadError
from laconic.exchange.coded import Channel, reduce_scatter_steps
from laconic.exchange.hook import hook
from laconic.transports.base import Transport, finish
from laconic.transports.faults import Faulty, WireMessage
from laconic.transports.launcher import LocalJob
from laconic.transports.threads import run_threads
from laconic.transports.world import World

TIMEOUT_S = 8.0
FAULT_AT = 6  # the sixth collective call: what ranks agree on and some steps went well before
CULPRIT = 1


def _train(form: str, fault: str) -> dict[str, Any]:
    """Train until the fault; report the error as backward() raised it, when, and whether the weights stayed."""
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    world = laconic.init(timeout_s=TIMEOUT_S)
    assert world.engine == os.environ["LACONIC_ENGINE"]

    def chosen(message: WireMessage) -> bool:
        return world.rank == CULPRIT and message.sequence == FAULT_AT and message.peer == 2

    world.transport = Faulty(world.transport, **{fault: chosen})
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 50))
    ddp = DistributedDataParallel(model, bucket_cap_mb=0.02)  # several buckets, interleaved where the engine can
    state = laconic.compress(ddp, "dynamic8", algorithm=form)
    optimizer = torch.optim.SGD(ddp.parameters(), 0.1)
    torch.manual_seed(world.rank)
    found: dict[str, Any] = {}
    for step in range(8):
        before = [p.detach().clone() for p in model.parameters()]
        begun = time.monotonic()
        try:
            ddp(torch.randn(8, 64)).square().mean().backward()
            optimizer.step()
        except LaconicError as error:
            found = {"step": step, "kind": type(error).__name__, "text": str(error)}
            found["seconds"] = time.monotonic() - begun
            found["unchanged"] = all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
            found["finite"] = all(p.isfinite().all() for p in model.parameters())
            break
    # A rank that goes on all the same gets the same error again, at once.
    try:
        ddp(torch.randn(8, 64)).sum().backward()
    except LaconicError as error:
        found["again"] = type(error).__name__
    state.close()
    time.sleep(0.5)
    return found


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "form"), [("gloo", "direct"), ("gloo", "gather"), ("zmq", "direct")])
def test_a_corrupted_payload(engine: str, form: str) -> None:
    job = LocalJob(4, _train, (form, "corrupt"), {"LACONIC_ENGINE": engine})
    found = [outcome.value for outcome in job.outcomes(timeout_s=100)]
    for rank, report in enumerate(found):
        assert report, f"rank {rank} said nothing"
        assert report["unchanged"], report
        assert report["finite"], report
        assert report["seconds"] < TIMEOUT_S + 4, report
        assert report["again"] == report["kind"]
        if rank == 2:
            assert report["kind"] == "PayloadError", report
            assert report["text"].startswith("[rank 2/4]")
            assert "peer 1 sent a bad payload" in report["text"]
        else:
            assert report["kind"] == "PeerLost", report
            assert report["text"].startswith(f"[rank {rank}/4]")
            assert "peer 1 sent a bad payload" in report["text"], report  # the others are told why
    steps = [report["step"] for report in found if report]
    assert steps[2] == min(steps)
    assert max(steps) <= min(steps) + 1  # in gather those whose payloads were sound finish the step
    if form == "direct":
        assert max(steps) == min(steps)


@pytest.mark.processes
@pytest.mark.parametrize(("engine", "form"), [("gloo", "direct"), ("zmq", "gather")])
def test_a_rank_killed_in_the_middle_of_an_exchange(engine: str, form: str) -> None:
    job = LocalJob(4, _train, (form, "die"), {"LACONIC_ENGINE": engine})
    survivors = (0, 2, 3)
    for outcome in job.outcomes(timeout_s=100, ranks=survivors):
        report = outcome.value
        assert report, outcome
        assert report["kind"] == "PeerLost", report
        assert report["text"].startswith(f"[rank {outcome.rank}/4]")
        assert "1" in report["text"].partition("]")[2]
        assert report["unchanged"], report
        assert report["seconds"] < TIMEOUT_S + 4, report
    assert job.processes[CULPRIT].exitcode == -9


def test_a_message_that_never_comes_and_one_that_comes_late() -> None:
    def lost(transport: Transport) -> str:
        faulty = Faulty(transport, drop=lambda m: transport.rank == 0 and m.peer == 1)
        try:
            laconic.all_reduce(torch.ones(500), codec="dynamic8", algorithm="gather", group=World(faulty))
        except CollectiveTimeout as error:
            return str(error)
        return ""

    texts = run_threads(3, lost, timeout_s=1)
    assert "[rank 1/3] gather all_reduce, round 1 of 1: nothing from or for peer 0" in texts[1]

    def late(transport: Transport) -> torch.Tensor:
        faulty = Faulty(transport, delay=lambda m: 0.05 if transport.rank == 0 and m.round == 1 else 0.0)
        return laconic.all_reduce(torch.ones(500), codec="none", algorithm="direct", group=World(faulty))

    assert all(torch.equal(result, torch.full((500,), 3.0)) for result in run_threads(3, late))


@pytest.mark.parametrize("numel", [1, 40, 5000])
def test_damage_is_noticed_whatever_the_length(numel: int) -> None:
    """Also in a reduce-scatter, and in messages that are mostly padding."""

    def work(transport: Transport) -> None:
        faulty = Faulty(transport, corrupt=lambda m: transport.rank == 1)
        piece = Channel(torch.ones(2, numel), laconic.codec("dynamic8"))
        finish(reduce_scatter_steps([piece, Channel(torch.ones(2, 3), laconic.codec("none"))], faulty))

    with pytest.raises(PayloadError, match=r"\[rank 0/2\] direct reduce_scatter, round 1 of 1: peer 1 sent a bad"):
        run_threads(2, work)


def test_without_faults_it_is_the_engine_itself() -> None:
    from tests.transports.conformance import run_conformance

    def work(transport: Transport) -> tuple[str, bool]:
        faulty = Faulty(transport)
        run_conformance(faulty)
        assert faulty.hub is transport.hub  # type: ignore[attr-defined]
        return faulty.engine, faulty.has_native

    assert run_threads(3, work) == [("threads", False)] * 3


def test_the_hook_is_public() -> None:
    assert laconic.exchange.ddp.hook is hook
