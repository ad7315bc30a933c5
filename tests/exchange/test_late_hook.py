"""compress(ddp, "auto") leaves DDP alone until a codec pays: then all ranks register the hook in the same step."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import laconic
from laconic.exchange import late_hook
from laconic.exchange.costs import spared_s
from laconic.exchange.late_hook import LOOK_AGAIN, WATCHED
from laconic.transports.launcher import run_local
from laconic_lab.clusters.cluster import Cluster


def _train(steps: int, auto: bool, plan: dict[int, float]) -> dict[str, Any]:
    """Train; `plan` says from which step on backward is told to have waited how long for DDP, in place of the truth."""
    torch.set_num_threads(1)
    if not dist.is_initialized():
        dist.init_process_group("gloo")
    torch.manual_seed(0)
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 10)))
    job = laconic.compress(ddp, "auto") if auto else None
    optimizer, draws = torch.optim.SGD(ddp.parameters(), 0.05), torch.Generator().manual_seed(dist.get_rank())
    registered, losses = None, []
    for step in range(steps):
        late_hook.spared_s = lambda *_, step=step: plan[max(s for s in plan if s <= step)]  # type: ignore[assignment]
        optimizer.zero_grad()
        loss = ddp(torch.randn(16, 64, generator=draws)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
        if registered is None and job is not None and job.records:
            registered = step
    text = "" if job is None else job.explain()
    if job is not None:
        job.close()
    return {"registered": registered, "losses": losses, "text": text}


def _ranks(*trainings: tuple[int, bool, dict[int, float]]) -> list[dict[str, Any]]:
    return [_train(*each) for each in trainings]


@pytest.mark.processes
def test_where_nothing_pays_ddp_trains_by_itself_to_the_bit() -> None:
    for alone, left in run_local(2, _ranks, ((20, False, {0: 0.0}), (20, True, {0: -1.0})), timeout_s=100):
        assert left["registered"] is None
        assert left["losses"] == alone["losses"]
        assert "DDP is left alone" in left["text"]


@pytest.mark.processes
def test_where_a_codec_pays_all_ranks_register_it_in_the_same_step() -> None:
    for (found,) in run_local(2, _ranks, ((WATCHED + 4, True, {0: 10.0}),), timeout_s=100):
        assert found["registered"] == WATCHED


@pytest.mark.processes
def test_ddp_is_watched_again_when_a_step_takes_another_time() -> None:
    steps = WATCHED + LOOK_AGAIN + WATCHED + 8
    for (found,) in run_local(2, _changing, (steps,), timeout_s=100):
        assert found["registered"] == WATCHED + LOOK_AGAIN + WATCHED


def _changing(steps: int) -> list[dict[str, Any]]:
    late_hook.CLEARLY = 1.0  # every other time counts
    return [_train(steps, True, {0: -1.0, WATCHED + 1: 10.0})]


def _one_more_look(evaluates: bool) -> int:
    """Rank 0 calls the model once more than rank 1: DDP does not mind, and neither may we."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Linear(64, 10))
    with laconic.compress(ddp, "auto"):
        for step in range(WATCHED + 4):
            if step == (WATCHED if evaluates else 2) and dist.get_rank() == 0:
                with torch.set_grad_enabled(not evaluates):
                    ddp(torch.randn(1, 64))
            if evaluates:
                dist.barrier()  # the others wait for the evaluation
            ddp(torch.randn(16, 64)).square().mean().backward()
    return step


@pytest.mark.processes
@pytest.mark.parametrize("evaluates", [False, True])
def test_a_forward_without_backward_on_one_rank_does_no_harm(evaluates: bool) -> None:
    assert run_local(2, _one_more_look, (evaluates,), timeout_s=60) == [WATCHED + 3] * 2


def _unequal_shares() -> int:
    """Rank 0 has more batches than rank 1, in DDP's join()."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp, steps = DistributedDataParallel(nn.Linear(64, 10)), 0
    with laconic.compress(ddp, "auto"):
        for _ in range(2):
            with ddp.join():
                for _ in range(WATCHED - 4 if dist.get_rank() else WATCHED + 2):
                    ddp(torch.randn(16, 64)).square().mean().backward()
                    steps += 1
    return steps


@pytest.mark.processes
def test_ranks_with_unequal_numbers_of_batches_do_not_wait_for_each_other() -> None:
    assert run_local(2, _unequal_shares, (), timeout_s=60) == [2 * (WATCHED + 2), 2 * (WATCHED - 4)]


def test_what_is_spared() -> None:
    assert spared_s(0.0, 1.0, 0.25, 0.1) == -0.1, "nothing waits, so nothing can be spared"
    assert spared_s(1.0, 1.0, 2.0, 0.0) == 0.0, "a codec that sends more spares nothing"
    assert spared_s(1.0, 1.0, 0.25, 0.05) == 0.7


@pytest.mark.processes
@pytest.mark.alone  # it measures the link
@pytest.mark.skipif(os.geteuid() != 0, reason="emulated networks need root")
def test_on_a_slow_network_a_codec_pays_by_measurement() -> None:
    with Cluster(2, "20mbit") as cluster:
        for found in cluster.run(_measured, (), timeout_s=120):
            assert found["registered"] == WATCHED, found["text"]


def _measured() -> dict[str, Any]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 256)))
    job = laconic.compress(ddp, "auto")
    registered = None
    for step in range(WATCHED + 3):
        ddp(torch.randn(16, 256)).square().mean().backward()
        if registered is None and job.records:
            registered = step
    text = job.explain()
    job.close()
    return {"registered": registered, "text": text}
